package stream

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/waystamp/waystamp/internal/host"
)

// Serve is the life of a worker's process: it reads its configuration, listens, gives up
// what it does not need, and serves until the context ends. It takes over statistics,
// memory of NewStatistics.
func Serve(ctx context.Context, config io.Reader, statistics *os.File) error {
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
	return w.Run(ctx)
}
