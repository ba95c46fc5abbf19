package dataplane

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
)

// Listeners direct all new TCP connections that come by one interface to a worker's listeners, until
// they are closed, or the process ends; if others hold File, until these do.
type Listeners struct {
	program *ebpf.Program
	sockets *ebpf.Map
	link    link.Link
}

// GiveConnections attaches the program of a worker's namespace. from is the index, there, of the
// interface that connections come by; those that come by another are reset. listeners are one of IPv6
// and one of IPv4, which stay the caller's.
func GiveConnections(ns *host.NetNS, from int, listeners []*os.File) (_ *Listeners, err error) {
	l := &Listeners{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("give connections to a worker: %w", err), l.Close())
		}
	}()
	spec, err := object.LoadStreamLookup()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[object.StreamFromNode].Set(uint32(from)); err != nil {
		return nil, fmt.Errorf("set variable %s: %w", object.StreamFromNode, err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, err
	}
	l.program, l.sockets = c.DetachProgram(object.StreamLookup), c.DetachMap(object.StreamListeners)
	c.Close()
	for i, f := range listeners {
		if err := l.sockets.Put(uint32(i), uint64(f.Fd())); err != nil {
			return nil, fmt.Errorf("write a listener to map %s: %w", object.StreamListeners, err)
		}
	}
	err = ns.Do(func() error {
		here, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer here.Close()
		l.link, err = link.AttachNetNs(int(here.Fd()), l.program)
		return err
	})
	return l, err
}

// File is the link of the program, for a process that has to keep it. The caller closes it.
func (l *Listeners) File() (*os.File, error) {
	held, ok := l.link.(interface{ FD() int })
	if !ok {
		return nil, fmt.Errorf("the link of a worker's program is a %T", l.link)
	}
	fd, err := unix.FcntlInt(uintptr(held.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl F_DUPFD_CLOEXEC", err)
	}
	return os.NewFile(uintptr(fd), "link"), nil
}

// TakeAll detaches all other programs of this kind from the namespace, so that connections are given to these listeners
// alone, and says how many there were: whoever holds the link of one keeps it attached otherwise. It needs CAP_SYS_ADMIN,
// as all does that opens a link by its id.
func (l *Listeners) TakeAll(ns *host.NetNS) (others int, err error) {
	for range takeTries {
		n := 0
		n, err = l.takeAll(ns)
		others += n
		if !errors.Is(err, unix.EAGAIN) { // somebody on the machine is just attaching something
			break
		}
	}
	if err != nil {
		err = fmt.Errorf("detach other programs that give connections to a worker: %w", err)
	}
	return others, err
}

// takeTries bounds how often all links of the machine are looked at again.
const takeTries = 100

func (l *Listeners) takeAll(ns *host.NetNS) (others int, err error) {
	own, err := l.link.Info()
	if err != nil {
		return 0, err
	}
	it := new(link.Iterator)
	defer it.Close()
	for it.Next() {
		held, ok := it.Link.(*link.NetNsLink)
		if !ok || it.ID == own.ID {
			continue
		}
		info, err := held.Info()
		if err != nil {
			return others, fmt.Errorf("link %d: %w", it.ID, err)
		}
		at := info.NetNs()
		if ebpf.AttachType(at.AttachType) != ebpf.AttachSkLookup || uint64(at.NetnsInode) != ns.Inode() {
			continue
		}
		if err := held.Detach(); err != nil {
			return others, fmt.Errorf("link %d: %w", it.ID, err)
		}
		others++
	}
	return others, it.Err()
}

// Close takes the program off, unless others hold File.
func (l *Listeners) Close() error {
	var errs []error
	if l.link != nil {
		errs = append(errs, l.link.Close())
	}
	if l.program != nil {
		errs = append(errs, l.program.Close())
	}
	if l.sockets != nil {
		errs = append(errs, l.sockets.Close())
	}
	return errors.Join(errs...)
}
