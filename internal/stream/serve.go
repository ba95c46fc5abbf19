package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// Serve is the life of a worker's process: it reads its configuration, listens, gives up
// what it does not need, and serves until the context ends. It takes over statistics,
// memory of NewStatistics. A process of root's becomes the user.
//
// parent, unless it is nil, is one end of a pair of sockets: the worker sends a listener of
// each version of IP, IPv6 first, and ends when the other end is closed.
func Serve(ctx context.Context, config io.Reader, statistics, parent *os.File, user uint32) error {
	c, err := ReadConfig(config)
	if err != nil {
		return err
	}
	memory, err := host.OpenSharedWords(statistics)
	if err != nil {
		return fmt.Errorf("open the memory for statistics: %w", err)
	}
	defer memory.Close()
	w, err := New(c, memory)
	if err != nil {
		return err
	}
	if parent != nil {
		fd := int(parent.Fd()) // blocks from now on
		if err := unix.Sendmsg(fd, []byte{0}, unix.UnixRights(w.loops[0].listeners...), nil, 0); err != nil {
			return errors.Join(fmt.Errorf("hand the listeners to the parent: %w", err), w.Close())
		}
		var stop context.CancelFunc
		ctx, stop = context.WithCancel(ctx)
		defer stop()
		go func() {
			// Nothing is ever sent; it ends with the process at the latest.
			for {
				if n, err := unix.Read(fd, make([]byte, 1)); n == 0 || err != nil && err != unix.EINTR {
					stop()
					return
				}
			}
		}()
	}
	if err := sandbox.Enter(sandbox.Options{User: user}); err != nil {
		return errors.Join(fmt.Errorf("confine the worker of function %s: %w", c.Name, err), w.Close())
	}
	return w.Run(ctx)
}
