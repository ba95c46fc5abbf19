package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// Serve is the life of a worker's process: it reads its configuration, listens, gives up
// what it does not need, and serves until the context ends. It takes over statistics,
// memory of NewStatistics. A process of root's becomes the user.
func Serve(ctx context.Context, config io.Reader, statistics *os.File, user uint32) error {
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
	if err := sandbox.Enter(sandbox.Options{User: user}); err != nil {
		return errors.Join(fmt.Errorf("confine the worker of function %s: %w", c.Name, err), w.Close())
	}
	return w.Run(ctx)
}
