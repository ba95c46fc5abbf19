package await

import (
	"context"
	"errors"
	"testing"
)

func TestWhatIsDoneInTimeIsReturned(t *testing.T) {
	wrong := errors.New("wrong")
	if v, err := Do(t.Context(), func() (int, error) { return 7, wrong }); v != 7 || !errors.Is(err, wrong) {
		t.Errorf("got %d, %v", v, err)
	}
}

func TestWhoIsAskedToEndDoesNotWait(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	asked := errors.New("asked to end")
	begun, end := make(chan bool), make(chan bool)
	go func() {
		<-begun
		cancel(asked)
	}()
	v, err := Do(ctx, func() (int, error) {
		close(begun)
		<-end
		return 7, nil
	})
	if v != 0 || !errors.Is(err, asked) {
		t.Errorf("got %d, %v", v, err)
	}
	close(end)
	if _, err := Do(ctx, func() (int, error) { t.Error("begun after the end"); return 0, nil }); !errors.Is(err, asked) {
		t.Errorf("got %v", err)
	}
}
