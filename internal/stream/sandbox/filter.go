package sandbox

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data of <linux/seccomp.h>. An argument has 64 bits; its lower
// half comes first on machines of little endian, the only ones that this is built for.
const (
	dataNumber = 0
	dataArch   = 4
	dataArg    = 16
)

// argument is the offset of the lower half of argument i. The kernel takes these
// arguments as 32-bit numbers, or looks at no higher bit.
func argument(i uint32) uint32 { return dataArg + 8*i }

// always are the calls that a worker makes, and Go's runtime for it, whatever their
// arguments. The kernel remembers that they are, so that they cost next to nothing.
var always = append([]uint32{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_SPLICE, unix.SYS_CLOSE, unix.SYS_ACCEPT4, unix.SYS_BIND, unix.SYS_CONNECT,
	unix.SYS_SHUTDOWN, unix.SYS_GETSOCKNAME, unix.SYS_GETSOCKOPT, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_PIPE2,
	unix.SYS_EVENTFD2, unix.SYS_GETRANDOM,
	// The runtime: threads, signals, memory, time.
	unix.SYS_FUTEX, unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_GETTID, unix.SYS_GETPID,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
	unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
	unix.SYS_EPOLL_CREATE1, // for its timers, whenever the first is set
	unix.SYS_PREAD64,       // the limits of its cgroup, which it has open
}, ofThisMachine...)

// options are the socket options that a worker sets.
var options = [][2]uint32{
	{unix.SOL_SOCKET, unix.SO_LINGER}, {unix.SOL_SOCKET, unix.SO_REUSEADDR}, {unix.SOL_SOCKET, unix.SO_KEEPALIVE},
	{unix.SOL_SOCKET, unix.SO_OOBINLINE}, {unix.IPPROTO_TCP, unix.TCP_NODELAY},
	{unix.IPPROTO_IP, unix.IP_FREEBIND}, {unix.IPPROTO_IPV6, unix.IPV6_FREEBIND},
	{unix.IPPROTO_IP, unix.IP_TOS}, {unix.IPPROTO_IPV6, unix.IPV6_TCLASS},
}

// ofStreams are calls that other workers make: one that stays hands its files to the next agent, and event loops hand each
// other connections.
var ofStreams = []uint32{unix.SYS_SENDMSG, unix.SYS_RECVMSG}

// ofGateways are calls that a gateway makes beside these: the audit log's, and net's where it has connected.
var ofGateways = []uint32{unix.SYS_GETPEERNAME, unix.SYS_LSEEK, unix.SYS_FTRUNCATE, unix.SYS_FSYNC}

// optionsOfGateways are those that net sets, too.
var optionsOfGateways = [][2]uint32{
	{unix.SOL_SOCKET, unix.SO_BROADCAST}, {unix.IPPROTO_IPV6, unix.IPV6_V6ONLY},
	{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE}, {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT},
}

const (
	allow  = unix.SECCOMP_RET_ALLOW
	refuse = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	kill   = unix.SECCOMP_RET_KILL_PROCESS

	x32 = 0x40000000 // in the numbers of amd64's calls with 32-bit pointers
)

// program is the filter. What is not in it fails with EPERM: unlike a killed process, a
// call that a later Go runtime would like to make then costs no connection.
func program(pid int, gateway bool) []bpf.Instruction {
	calls, options := slices.Concat(always, ofStreams), options
	if gateway {
		calls, options = slices.Concat(always, ofGateways), slices.Concat(options, optionsOfGateways)
	}
	var p []bpf.Instruction
	load := func(offset uint32) { p = append(p, bpf.LoadAbsolute{Off: offset, Size: 4}) }
	end := func(action uint32) { p = append(p, bpf.RetConstant{Val: action}) }
	// when adds what is to be done under a condition, and goes on behind it otherwise.
	when := func(c bpf.JumpTest, v uint32, body func()) {
		at := len(p)
		p = append(p, nil)
		body()
		p[at] = bpf.JumpIf{Cond: c, Val: v, SkipFalse: uint8(len(p) - at - 1)}
	}
	load(dataArch)
	when(bpf.JumpNotEqual, auditArch, func() { end(kill) })
	load(dataNumber)
	when(bpf.JumpGreaterOrEqual, x32, func() { end(refuse) })
	for _, n := range calls {
		when(bpf.JumpEqual, n, func() { end(allow) })
	}
	// TCP over IPv4 and IPv6, and no other sockets.
	when(bpf.JumpEqual, unix.SYS_SOCKET, func() {
		load(argument(0))
		when(bpf.JumpNotEqual, unix.AF_INET, func() { when(bpf.JumpNotEqual, unix.AF_INET6, func() { end(refuse) }) })
		load(argument(1))
		p = append(p, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xf})
		when(bpf.JumpNotEqual, unix.SOCK_STREAM, func() { end(refuse) })
		load(argument(2))
		when(bpf.JumpEqual, unix.IPPROTO_TCP, func() { end(allow) })
		if gateway { // net names none, which is TCP
			when(bpf.JumpEqual, unix.IPPROTO_IP, func() { end(allow) })
		}
		end(refuse)
	})
	when(bpf.JumpEqual, unix.SYS_SETSOCKOPT, func() {
		for _, o := range options {
			load(argument(1))
			when(bpf.JumpEqual, o[0], func() {
				load(argument(2))
				when(bpf.JumpEqual, o[1], func() { end(allow) })
			})
		}
		end(refuse)
	})
	// No signals to others by way of O_ASYNC and F_SETOWN.
	when(bpf.JumpEqual, unix.SYS_FCNTL, func() {
		load(argument(1))
		for _, c := range []uint32{unix.F_SETPIPE_SZ, unix.F_GETPIPE_SZ, unix.F_GETFD, unix.F_SETFD, unix.F_GETFL} {
			when(bpf.JumpEqual, c, func() { end(allow) })
		}
		when(bpf.JumpEqual, unix.F_SETFL, func() {
			load(argument(2))
			when(bpf.JumpBitsSet, unix.O_ASYNC, func() { end(refuse) })
			end(allow)
		})
		end(refuse)
	})
	// Threads, and no processes.
	when(bpf.JumpEqual, unix.SYS_CLONE, func() {
		load(argument(0))
		when(bpf.JumpBitsSet, unix.CLONE_THREAD, func() { end(allow) })
		end(refuse)
	})
	// Signals to itself, by which the runtime interrupts threads.
	when(bpf.JumpEqual, unix.SYS_TGKILL, func() {
		load(argument(0))
		when(bpf.JumpEqual, uint32(pid), func() { end(allow) })
		end(refuse)
	})
	// No memory that was written can be run.
	when(bpf.JumpEqual, unix.SYS_MMAP, func() {
		load(argument(2))
		when(bpf.JumpBitsSet, unix.PROT_EXEC, func() { end(refuse) })
		end(allow)
	})
	end(refuse)
	return p
}

// filterCalls puts the filter on all threads.
func filterCalls(gateway bool) error {
	if auditArch == 0 {
		return fmt.Errorf("there is no filter of system calls for %s; a worker runs on amd64 and arm64", runtime.GOARCH)
	}
	raw, err := bpf.Assemble(program(os.Getpid(), gateway))
	if err != nil {
		return fmt.Errorf("assemble the filter of system calls: %w", err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("filter system calls: %w", errno)
	}
	if thread != 0 {
		return fmt.Errorf("filter system calls: thread %d has another filter", thread)
	}
	return nil
}
