package bench

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// disturbedMost is the share of the machine's CPU time that may go to others while
// figures are measured. With more, they are shown and not judged.
const disturbedMost = 0.05

// usage is what the machine's CPUs have spent since they started, and this process
// and the children that it has waited for. Only time in user mode counts: what the
// kernel does for packets it charges to whoever runs.
type usage struct {
	all, own time.Duration
	at       time.Time
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
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var r unix.Rusage
		if err := unix.Getrusage(who, &r); err != nil {
			return usage{}, fmt.Errorf("read the time that this process has spent: %w", err)
		}
		u.own += time.Duration(r.Utime.Nano())
	}
	return u, nil
}

// userTime is user, nice and steal of all CPUs together, from /proc/stat (proc_stat(5)):
// columns 1, 2 and 8 of the first line, in hundredths of a second.
func userTime(stat io.Reader) (time.Duration, error) {
	const tick = time.Second / 100 // USER_HZ
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
