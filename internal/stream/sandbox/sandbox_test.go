package sandbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asConfined, in the environment, has the test's binary enter the sandbox, try things,
// and report. Its value: the filter is "on" or "off", or that of a "gateway".
const asConfined = "WAYSTAMP_TEST_CONFINED"

func TestMain(m *testing.M) {
	if how := os.Getenv(asConfined); how != "" {
		if err := confined(how); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// report is what a confined process has seen: an errno for each thing that it tried, 0 if
// it worked.
type report struct {
	Tried             map[string]unix.Errno
	UID, EUID, GID    int
	Groups            []int
	NoNewPrivs        int
	Bounding, Ambient uint64
}

func confined(how string) error {
	noFilter := how == "off"
	// Threads that were there before are confined, too.
	var ready, wait sync.WaitGroup
	entered, results := make(chan bool), make(chan unix.Errno, 4)
	for range 4 {
		ready.Add(1)
		wait.Go(func() {
			runtime.LockOSThread()
			ready.Done()
			<-entered
			_, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			results <- errnoOf(err)
		})
	}
	ready.Wait()
	file, err := os.CreateTemp("", "")
	if err != nil {
		return err
	}
	defer file.Close()
	if err := os.Remove(file.Name()); err != nil {
		return err
	}
	written := int(file.Fd())
	// What a worker of streams would end by.
	signal.Ignore(unix.SIGXFSZ)
	if err := Enter(Options{noFilter: noFilter, Gateway: how == "gateway"}); err != nil {
		return err
	}
	close(entered)
	wait.Wait()
	close(results)
	r := report{Tried: map[string]unix.Errno{}}
	for e := range results {
		if e == 0 || r.Tried["open on an older thread"] == 0 {
			r.Tried["open on an older thread"] = e
		}
	}
	try := func(what string, f func() error) { r.Tried[what] = errnoOf(f()) }
	fd := func(fd int, err error) error {
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	raw := func(trap uintptr, args ...uintptr) func() error {
		return func() error {
			var a [6]uintptr
			copy(a[:], args)
			if _, _, errno := unix.Syscall6(trap, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
				return errno
			}
			return nil
		}
	}
	try("open", func() error { return fd(unix.Open("/etc/passwd", unix.O_RDONLY, 0)) })
	try("open the root", func() error { return fd(unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY, 0)) })
	try("create", func() error { return fd(unix.Open("x", unix.O_WRONLY|unix.O_CREAT, 0o600)) })
	try("stat", func() error { return unix.Stat("/etc/passwd", new(unix.Stat_t)) })
	try("Unix socket", func() error { return fd(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)) })
	try("netlink socket", func() error { return fd(unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE)) })
	try("packet socket", func() error { return fd(unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)) })
	try("UDP socket", func() error { return fd(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP)) })
	try("raw socket", func() error { return fd(unix.Socket(unix.AF_INET6, unix.SOCK_RAW, unix.IPPROTO_TCP)) })
	try("MPTCP socket", func() error { return fd(unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP)) })
	try("ptrace", func() error { return unix.PtraceAttach(os.Getppid()) })
	try("setuid", raw(unix.SYS_SETUID, 0))
	try("setgid", raw(unix.SYS_SETGID, 0))
	try("kill", func() error { return unix.Kill(os.Getppid(), 0) })
	try("unshare", func() error { return unix.Unshare(unix.CLONE_NEWUSER) })
	try("mount", func() error { return unix.Mount("none", "/", "tmpfs", 0, "") })
	try("bpf", raw(unix.SYS_BPF, 0, 0, 0))
	try("io_uring", raw(unix.SYS_IO_URING_SETUP, 1, 0))
	try("fork", func() error {
		pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			return errno
		}
		if pid == 0 {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
		_, err := unix.Wait4(int(pid), nil, 0, nil)
		return err
	})
	try("exec", func() error { return unix.Exec("/proc/self/exe", []string{"x"}, nil) })
	try("memory that runs", func() error {
		_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
		return err
	})
	tcp, tcpErr := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	try("TCP socket", func() error { return tcpErr })
	try("SO_LINGER", func() error {
		return unix.SetsockoptLinger(tcp, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
	try("SO_MARK", func() error { return unix.SetsockoptInt(tcp, unix.SOL_SOCKET, unix.SO_MARK, 1) })
	try("IPV6_TRANSPARENT", func() error { return unix.SetsockoptInt(tcp, unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT, 1) })
	try("IPV6_FREEBIND", func() error { return unix.SetsockoptInt(tcp, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1) })
	try("TCP_KEEPIDLE", func() error { return unix.SetsockoptInt(tcp, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 60) })
	try("TCP_REPAIR", func() error { return unix.SetsockoptInt(tcp, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) })
	try("SO_BINDTODEVICE", func() error { return unix.BindToDevice(tcp, "lo") })
	try("TCP socket by the default", func() error { return fd(unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)) })
	try("fsync", func() error { return unix.Fsync(written) })
	try("ftruncate", func() error { return unix.Ftruncate(written, 1) })
	try("fchmod", func() error { return unix.Fchmod(written, 0o666) })
	try("write to a file", func() error { _, err := unix.Write(written, []byte("x")); return err })
	try("pipe", func() error { var p [2]int; return unix.Pipe2(p[:], unix.O_CLOEXEC) })
	// No signals to others by O_ASYNC, and nothing else that changes more than the descriptor.
	var pipe [2]int
	if tcpErr == nil {
		tcpErr = unix.Pipe2(pipe[:], unix.O_CLOEXEC)
	}
	fcntl := func(of, command, argument int) func() error {
		return func() error { _, err := unix.FcntlInt(uintptr(of), command, argument); return err }
	}
	for _, c := range fcntls {
		of := tcp
		if c.ofPipe {
			of = pipe[1]
		}
		try(c.name, fcntl(of, c.command, c.argument))
	}
	// The runtime goes on: new threads, and garbage collection.
	for range 8 {
		wait.Go(func() {
			runtime.LockOSThread()
			runtime.GC()
		})
	}
	wait.Wait()
	r.UID, r.EUID, r.GID = unix.Getuid(), unix.Geteuid(), unix.Getgid()
	if noFilter {
		r.Groups, _ = unix.Getgroups()
		r.NoNewPrivs, _ = unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
		for c := range 64 {
			if n, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && n == 1 {
				r.Bounding |= 1 << c
			}
			if n, err := unix.PrctlRetInt(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_IS_SET, uintptr(c), 0, 0); err == nil && n == 1 {
				r.Ambient |= 1 << c
			}
		}
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// fcntls are calls of fcntl(2), and which of them a worker may make.
var fcntls = []struct {
	name              string
	command, argument int
	ofPipe, works     bool
}{
	{"F_GETFD", unix.F_GETFD, 0, false, true},
	{"F_SETFD", unix.F_SETFD, unix.FD_CLOEXEC, false, true},
	{"F_GETFL", unix.F_GETFL, 0, false, true},
	{"F_SETFL O_NONBLOCK", unix.F_SETFL, unix.O_NONBLOCK, false, true},
	{"F_GETPIPE_SZ", unix.F_GETPIPE_SZ, 0, true, true},
	{"F_SETPIPE_SZ", unix.F_SETPIPE_SZ, 1 << 16, true, true},
	{"F_SETFL O_ASYNC", unix.F_SETFL, unix.O_NONBLOCK | unix.O_ASYNC, false, false},
	{"F_SETOWN", unix.F_SETOWN, 1, false, false},
	{"F_GETOWN", unix.F_GETOWN, 0, false, false},
	{"F_SETSIG", unix.F_SETSIG, int(unix.SIGTERM), false, false},
	{"F_DUPFD", unix.F_DUPFD, 0, false, false},
	{"F_DUPFD_CLOEXEC", unix.F_DUPFD_CLOEXEC, 0, false, false},
	{"F_SETLEASE", unix.F_SETLEASE, unix.F_RDLCK, false, false},
	{"F_NOTIFY", unix.F_NOTIFY, 2, false, false},
	{"F_ADD_SEALS", unix.F_ADD_SEALS, unix.F_SEAL_WRITE, false, false},
	{"F_SETLK", unix.F_SETLK, 0, false, false},
}

func errnoOf(err error) unix.Errno {
	var e unix.Errno
	if errors.As(err, &e) || err == nil {
		return e
	}
	return 9999
}

func runConfined(t *testing.T, how string) report {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root: it gives it up")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), asConfined+"="+how)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s%s", err, out, stderr.String())
	}
	var r report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return r
}

func TestAConfinedProcessMakesNoOtherCalls(t *testing.T) {
	for how, others := range map[string][]string{
		"on":      nil,
		"gateway": {"TCP_KEEPIDLE", "TCP socket by the default", "fsync", "ftruncate", "write to a file"},
	} {
		r := runConfined(t, how)
		works := map[string]bool{"TCP socket": true, "SO_LINGER": true, "IPV6_FREEBIND": true, "pipe": true}
		for _, o := range others {
			works[o] = true
		}
		for _, c := range fcntls {
			works[c.name] = c.works
		}
		for what, errno := range r.Tried {
			refused := unix.EPERM
			if what == "write to a file" {
				refused = unix.EFBIG // by a limit
			}
			switch {
			case works[what] && errno != 0:
				t.Errorf("%s, %s: %v, want that it works", how, what, errno)
			case !works[what] && errno != refused:
				t.Errorf("%s, %s: %d (%v), want %v", how, what, errno, errno, refused)
			}
		}
		if len(r.Tried) < 33+len(fcntls) {
			t.Errorf("only %d things were tried", len(r.Tried))
		}
	}
}

// Below the filter nothing can be had, either.
func TestAConfinedProcessHasNoRights(t *testing.T) {
	r := runConfined(t, "off")
	if r.UID != Nobody || r.EUID != Nobody || r.GID != Nobody || len(r.Groups) != 0 {
		t.Errorf("user %d, effective %d, group %d, groups %v; want %d and no groups", r.UID, r.EUID, r.GID, r.Groups, Nobody)
	}
	if r.NoNewPrivs != 1 || r.Bounding != 0 || r.Ambient != 0 {
		t.Errorf("no_new_privs is %d, bounding set %#x, ambient set %#x; want 1 and none", r.NoNewPrivs, r.Bounding, r.Ambient)
	}
	// A root that is empty can still be opened; Landlock forbids that, too.
	root := unix.EACCES
	if version, err := landlock(); err != nil {
		t.Fatal(err)
	} else if version == 0 {
		root = 0
	}
	for what, any := range map[string][]unix.Errno{
		"open":                    {unix.EACCES, unix.ENOENT},
		"open the root":           {root},
		"open on an older thread": {root},
		"create":                  {unix.EACCES, unix.ENOENT},
		"stat":                    {unix.EACCES, unix.ENOENT},
		"packet socket":           {unix.EPERM},
		"raw socket":              {unix.EPERM},
		"setuid":                  {unix.EPERM},
		"setgid":                  {unix.EPERM},
		"ptrace":                  {unix.EPERM},
		"SO_MARK":                 {unix.EPERM},
		"IPV6_TRANSPARENT":        {unix.EPERM},
		"exec":                    {unix.EACCES, unix.ENOENT},
	} {
		got, ok := r.Tried[what]
		found := false
		for _, e := range any {
			found = found || got == e
		}
		if !ok || !found {
			t.Errorf("%s: %d (%v), want %v", what, got, got, any)
		}
	}
}

func TestTheFilterKnowsItsMachine(t *testing.T) {
	// Little endian, see argument.
	one := uint64(1)
	if *(*byte)(unsafe.Pointer(&one)) != 1 {
		t.Error("this machine is of big endian; the filter looks at the wrong halves of arguments")
	}
	for _, gateway := range []bool{false, true} {
		if n := len(program(1, gateway)); n > unix.BPF_MAXINSNS || n < len(always) {
			t.Errorf("the filter has %d instructions", n)
		}
	}
}

// A hard limit that is lower than ours stays: to raise it takes CAP_SYS_RESOURCE.
func TestLimitsAreLoweredOnly(t *testing.T) {
	const resource = unix.RLIMIT_SIGPENDING // which nothing here comes near
	for _, c := range []struct{ hard, to, want uint64 }{{5000, 4096, 4096}, {1000, 4096, 1000}} {
		if err := unix.Setrlimit(resource, &unix.Rlimit{Cur: c.hard / 2, Max: c.hard}); err != nil {
			t.Fatal(err)
		}
		err := lower(resource, c.to)
		var is unix.Rlimit
		if e := unix.Getrlimit(resource, &is); err != nil || e != nil || is != (unix.Rlimit{Cur: c.want, Max: c.want}) {
			t.Errorf("from %d to %d: %+v, %v, %v; want %d", c.hard, c.to, is, err, e, c.want)
		}
	}
}
