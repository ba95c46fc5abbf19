package host

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMasksOfCPUs(t *testing.T) {
	for want, cpus := range map[string][]int{
		"00000000":                   nil,
		"00000003":                   {0, 1},
		"80000000":                   {31},
		"00000001,00000000,00000001": {64, 0},
	} {
		if got := cpuMask(cpus); got != want {
			t.Errorf("CPUs %v: %s; want %s", cpus, got, want)
		}
	}
}

func TestSteerReceivedIsOfItsOwnNamespace(t *testing.T) {
	a, b := scratch(t), scratch(t)
	if err := a.AddVeth(Veth{Name: "here", PeerName: "there", Peer: b.NetNS(), Queues: 2}); err != nil {
		t.Fatal(err)
	}
	if err := a.SteerReceived("here", 0); err != nil {
		t.Fatal(err)
	}
	if err := a.SteerReceived("there", 0); err == nil || !strings.Contains(err.Error(), "class/net/there") {
		t.Errorf("an interface of another namespace: %v; want that it is not there", err)
	}
	// What the kernel says.
	out, err := Command(t.Context(), a.NetNS(), "sh", "-c", "unshare -m sh -c 'mount -t sysfs none /sys && cat /sys/class/net/here/queues/rx-*/rps_cpus'").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := strings.Fields(string(out)); len(got) != 2 || strings.TrimLeft(got[0], "0,") != "1" || got[1] != got[0] {
		t.Errorf("CPUs of the queues: %q; want CPU 0 for both", got)
	}
}

func TestRunOnPlacesAllThreads(t *testing.T) {
	end, begin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Close()
	// cat waits until the pipe is closed.
	p, err := os.StartProcess("/bin/cat", []string{"cat"}, &os.ProcAttr{Files: []*os.File{end, nil, os.Stderr}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		begin.Close()
		p.Wait()
	}()
	on := func() int {
		var set unix.CPUSet
		if err := unix.SchedGetaffinity(p.Pid, &set); err != nil {
			t.Fatal(err)
		}
		return set.Count()
	}
	all := on()
	if err := RunOn(p.Pid, 0); err != nil {
		t.Fatal(err)
	}
	if n := on(); n != 1 {
		t.Errorf("the process may run on %d CPUs; want one", n)
	}
	if err := RunOn(p.Pid); err != nil {
		t.Fatal(err)
	}
	if n := on(); n != all {
		t.Errorf("the process may run on %d CPUs; want %d again", n, all)
	}
}
