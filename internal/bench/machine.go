package bench

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine is what figures were measured on.
type Machine struct {
	CPU         string   `json:"cpu"`
	CPUs        int      `json:"cpus"`
	Kernel      string   `json:"kernel"`
	Arch        string   `json:"arch"`
	Mitigations []string `json:"mitigations"` // against CPU faults, that cost time
	Load        float64  `json:"load"`        // of the last minute before the first run
}

func machine() Machine {
	m := Machine{CPU: "unknown", CPUs: runtime.NumCPU(), Arch: runtime.GOARCH, Mitigations: []string{}}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		for s := bufio.NewScanner(f); s.Scan(); {
			if k, v, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(k) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
		f.Close()
	}
	const dir = "/sys/devices/system/cpu/vulnerabilities"
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		b, err := os.ReadFile(dir + "/" + e.Name())
		if text := strings.TrimSpace(string(b)); err == nil && text != "Not affected" {
			m.Mitigations = append(m.Mitigations, e.Name()+": "+text)
		}
	}
	m.Load = load()
	return m
}

// load is the average number of runnable tasks of the last minute.
func load() float64 {
	var l float64
	if b, err := os.ReadFile("/proc/loadavg"); err == nil {
		fmt.Sscan(string(b), &l)
	}
	return l
}
