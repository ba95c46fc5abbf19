package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// raiseDescriptors has the process hold as many descriptors as its connections take, if it may:
// two sockets each, some of them with pipes or two more. Where it may not, connections without
// descriptors are refused; room is how many there are descriptors for in one table.
func raiseDescriptors(connections int) (room uint64, err error) {
	var have unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &have); err != nil {
		return 0, os.NewSyscallError("getrlimit RLIMIT_NOFILE", err)
	}
	roomOf := func(limit uint64) uint64 { return (limit - min(limit, otherDescriptors)) / 2 }
	want := uint64(4*connections + otherDescriptors)
	if have.Max >= want {
		return roomOf(have.Max), nil // Go has raised the soft limit to it
	}
	text, err := os.ReadFile("/proc/sys/fs/nr_open")
	if err != nil {
		return 0, fmt.Errorf("read how many descriptors a process can have: %w", err)
	}
	if most, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
		want = max(min(want, most), have.Max)
	}
	err = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: want, Max: want})
	if errors.Is(err, unix.EPERM) { // CAP_SYS_RESOURCE is missing
		return roomOf(have.Max), nil
	}
	return roomOf(want), os.NewSyscallError("setrlimit RLIMIT_NOFILE", err)
}

// otherDescriptors are for listeners, loops and what a worker keeps for its agent, with some to spare.
const otherDescriptors = 256

// garbage is how much memory a worker leaves lying before it collects it, in percent of what it uses. A connection
// leaves three times what it keeps when it is opened, and most are idle afterwards.
const garbage = 25

// garbageSealed is the same where connections are sealed. Their handshakes leave more: collected as early as others' garbage, theirs took
// a quarter of a connection's CPU time.
const garbageSealed = 100

// Serve is the life of a worker's process: it reads its configuration, listens, gives up
// what it does not need, and serves until the context ends. It takes over statistics,
// memory of NewStatistics. A process of root's becomes the user.
//
// parent, unless it is nil, is one end of a pair of sockets: the worker sends a listener of
// each version of IP, IPv6 first, and ends when the other end is closed. held is a
// HeldSocket, if the configuration has SYNs wait. through are PlainListeners, if connections go in plain
// through a function; else there are none. With a parent, the limit of descriptors is
// raised to what the configuration takes; where that may not be, loops get descriptors of their own, and there are more of them. at and link are those of Stay, if the worker
// outlives its parent; else nil.
func Serve(ctx context.Context, config io.Reader, statistics, parent, held, at, link *os.File, user uint32, through ...*os.File) error {
	c, err := ReadConfig(config)
	if err != nil {
		return err
	}
	if c.Sealed {
		debug.SetGCPercent(garbageSealed)
	} else {
		debug.SetGCPercent(garbage)
	}
	if c.Memory > 0 {
		debug.SetMemoryLimit(int64(c.Memory / 8 * 7)) // collect garbage rather than end
	}
	memory, err := host.OpenSharedWords(statistics)
	if err != nil {
		return fmt.Errorf("open the memory for statistics: %w", err)
	}
	defer memory.Close()
	var room uint64 // of the process, or of each loop
	var apart []int // descriptors that all tables have; nil: there is one table
	var each uint64 // connections that one of them has descriptors for
	var tables int
	if parent != nil {
		if room, err = raiseDescriptors(c.Connections); err != nil {
			return err
		}
		if room < uint64(c.Connections) && !c.Sealed {
			if apart, err = host.RuntimeDescriptors(); err != nil {
				return err
			}
			each, tables = room, max(c.Loops, loopsFor(c.Connections, room))
			room *= uint64(tables)
		}
	}
	w, err := New(c, memory, held)
	if err != nil {
		return err
	}
	if apart != nil {
		if err := w.extend(tables, each, memory); err != nil {
			return errors.Join(fmt.Errorf("worker of function %s: %w", c.Name, err), w.Close())
		}
	}
	last := func() error { return nil }
	if (at == nil) != (link == nil) || at != nil && parent == nil {
		return errors.Join(fmt.Errorf("worker of function %s: what stays has a parent, a socket with a name, and one of its interface", c.Name), w.Close())
	}
	if parent != nil {
		// The descriptor alone is kept, which blocks: the file would close it.
		fd, err := unix.FcntlInt(parent.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err = errors.Join(os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err), parent.Close()); err != nil {
			return errors.Join(err, w.Close())
		}
		s := &speaking{w: w, fd: fd, waiting: map[uint64]*waitingAsk{}}
		if at != nil {
			s.stay = newStaying(at, link)
			if err := s.stay.prepare(); err != nil {
				return errors.Join(err, w.Close())
			}
			if err := w.loops[0].watch(s.stay.link, 0, aboutLink, 0); err != nil { // for errors, which are always told
				return errors.Join(err, w.Close())
			}
		}
		if room < uint64(c.Connections) {
			loopWords(memory, 0)[wordRoom].Store(room)
		}
		if err := sendFiles(s.fd, []byte{0}, w.loops[0].listeners...); err != nil {
			return errors.Join(fmt.Errorf("hand the listeners to the parent: %w", err), w.Close())
		}
		if s.stay != nil {
			if err := s.stay.release(s.fd, memory.File()); err != nil {
				return errors.Join(err, w.Close())
			}
			if held != nil {
				w.loops[0].dropHeld()
			}
		}
		var stop context.CancelFunc
		ctx, stop = context.WithCancel(ctx)
		defer stop()
		w.ask, w.refused = s.ask, newRefusalQueue()
		last = func() error {
			if apart != nil {
				var first []int
				if s.stay != nil {
					first = []int{s.stay.link}
				}
				if err := w.setApart(apart, first...); err != nil {
					return err
				}
			}
			go s.tellRefusals(w.refused)
			go func() { // it opens descriptors, which no other table is to have
				s.run() // it ends with the process at the latest
				stop()
			}()
			return nil
		}
	}
	if c.Sealed && parent == nil {
		return errors.Join(fmt.Errorf("worker of function %s: there is no parent to ask for keys of sealed connections", c.Name), w.Close())
	}
	if len(through) > 0 {
		if !c.Sealed || len(c.Run) > 0 || len(c.Back) > 0 {
			return errors.Join(fmt.Errorf("worker of function %s: sealed connections alone go in plain through a function, without run and back", c.Name), w.Close())
		}
		if w.plain, err = newPlain(through); err != nil {
			return errors.Join(fmt.Errorf("worker of function %s: %w", c.Name, err), w.Close())
		}
	}
	if err := sandbox.Enter(sandbox.Options{User: user, Memory: c.Memory, Last: last}); err != nil {
		return errors.Join(fmt.Errorf("confine the worker of function %s: %w", c.Name, err), w.Close())
	}
	return w.Run(ctx)
}
