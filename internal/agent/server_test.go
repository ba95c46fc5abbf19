package agent

import (
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// busyDataPath is one that puts a plan in force, which takes longer than a client may take for reading.
type busyDataPath struct {
	dataPath
	ready <-chan struct{}
}

func (d busyDataPath) Interfaces() ([]dataplane.InterfaceState, error) {
	<-d.ready
	return d.dataPath.Interfaces()
}

func TestStatusWaitsForTheDataPath(t *testing.T) {
	const within = 10 * time.Millisecond
	s := newStage(t, within, readersMost)
	defer s.end()
	ready := make(chan struct{})
	s.a.dp = busyDataPath{s.a.dp, ready}
	asked := make(chan error, 1)
	go func() {
		_, err := s.client.Status(t.Context())
		asked <- err
	}()
	select {
	case err := <-asked:
		t.Fatalf("answered before the data path: %v", err)
	case <-time.After(5 * within): // longer than a reader may take
	}
	close(ready)
	if err := <-asked; err != nil {
		t.Error(err)
	}
}
