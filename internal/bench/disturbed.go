package bench

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// disturbedMost is the share of the machine's CPU time that may go to others while
// figures are measured. With more, they are shown and not judged.
const disturbedMost = 0.05

// usage is what the machine's CPUs have spent since they started, and this process
// and all processes below it. Only time in user mode counts: what the
// kernel does for packets it charges to whoever runs.
type usage struct {
	all, own time.Duration
	at       time.Time
}

// keepOrphans makes the kernel give this process the children of those that end before them (PR_SET_CHILD_SUBREAPER): a
// worker of a function outlives its agent, and would be init's. Nobody waits for such a child, so that it stays in /proc, with its
// time, until this process ends: a few for each network.
func keepOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("keep processes whose parents have ended: %w", err)
	}
	return nil
}

func usageNow() (usage, error) {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return usage{}, fmt.Errorf("read the time that the CPUs have spent: %w", err)
	}
	defer f.Close()
	u := usage{at: time.Now()}
	if u.all, err = userTime(f); err != nil {
		return usage{}, err
	}
	// First those that were waited for: a process that is waited for in between is missing, and none counts twice.
	for _, who := range []int{unix.RUSAGE_CHILDREN, unix.RUSAGE_SELF} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			return usage{}, fmt.Errorf("read the time that this process has spent: %w", err)
		}
		u.own += time.Duration(r.Utime.Nano())
	}
	below, err := timeBelow(os.Getpid())
	u.own += below
	return u, err
}

const tick = time.Second / 100 // USER_HZ

// timeBelow is the time in user mode of all processes below one that nobody has waited for yet, whether they run or have ended,
// and of those that they have waited for.
func timeBelow(pid int) (time.Duration, error) {
	names, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || len(names) == 0 {
		return 0, fmt.Errorf("read the time of processes: no process is in /proc: %w", err)
	}
	children, spent := map[int][]int{}, map[int]time.Duration{}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // somebody has waited for it
		}
		if err != nil {
			return 0, fmt.Errorf("read the time of processes: %w", err)
		}
		// proc_pid_stat(5). The second column is a name in brackets that may hold anything.
		f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if len(f) < 15 {
			return 0, fmt.Errorf("read the time of processes: %s is not understood", name)
		}
		var number [4]int // of the process, its parent; ticks of its own in user mode, and of children that it has waited for
		for i, column := range []string{filepath.Base(filepath.Dir(name)), f[1], f[11], f[13]} {
			if number[i], err = strconv.Atoi(column); err != nil {
				return 0, fmt.Errorf("read the time of processes: %s is not understood: %w", name, err)
			}
		}
		children[number[1]] = append(children[number[1]], number[0])
		spent[number[0]] = time.Duration(number[2]+number[3]) * tick
	}
	var all time.Duration
	for todo := children[pid]; len(todo) > 0; todo = todo[1:] {
		all += spent[todo[0]]
		todo = append(todo, children[todo[0]]...)
	}
	return all, nil
}

// userTime is user, nice and steal of all CPUs together, from /proc/stat (proc_stat(5)):
// columns 1, 2 and 8 of the first line, in hundredths of a second.
func userTime(stat io.Reader) (time.Duration, error) {
	s := bufio.NewScanner(stat)
	s.Scan()
	var user, nice, system, idle, iowait, irq, softirq, steal int64
	if _, err := fmt.Fscanf(strings.NewReader(s.Text()), "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal); err != nil {
		return 0, fmt.Errorf("read the time that the CPUs have spent, from %q: %w", s.Text(), err)
	}
	return time.Duration(user+nice+steal) * tick, nil
}

// disturbed is the share of the CPUs' time since before that others have taken.
func (u usage) disturbed(before usage, cpus int) float64 {
	whole := u.at.Sub(before.at) * time.Duration(cpus)
	if whole <= 0 {
		return 0
	}
	return max(0, float64((u.all-before.all)-(u.own-before.own))/float64(whole))
}
