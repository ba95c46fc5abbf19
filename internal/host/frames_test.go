package host

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// Who asks whether a reader has caught up waits until it has, and is told what
// never came to it.
func TestFramesAreReadBeforeTheReaderHasCaughtUp(t *testing.T) {
	t.Parallel()
	const experimental = 0x88b5 // IEEE Std 802 9.2.3
	a, b := pair(t, 1500)
	must(t, a.WaitUp(soon(t), "a-b"))
	from, err := OpenFrames(a.NetNS(), "a-b", experimental)
	must(t, err)
	defer from.Close()
	to, err := OpenFrames(b.NetNS(), "b-a", experimental)
	must(t, err)
	defer to.Close()
	frame := append(append(bytes.Clone(to.MAC[:]), from.MAC[:]...), make([]byte, 64)...)
	binary.BigEndian.PutUint16(frame[12:], experimental)

	const sent = 100
	for range sent {
		must(t, from.Send(frame))
	}
	late, cancel := context.WithCancel(soon(t))
	cancel()
	if _, err := to.CaughtUp(late); !errors.Is(err, context.Canceled) {
		t.Errorf("with nobody reading: got %v, want %v", err, context.Canceled)
	}
	read := 0
	done := make(chan error, 1)
	go func() {
		done <- to.Receive(make([]byte, 1500), func([]byte) { read++ })
	}()
	dropped, err := to.CaughtUp(soon(t))
	must(t, err)
	if read != sent || dropped != 0 {
		t.Errorf("%d frames were read and %d dropped when the reader had caught up, want %d and none", read, dropped, sent)
	}

	// What finds no room is told, once and again.
	must(t, to.Close())
	must(t, <-done)
	if to, err = OpenFrames(b.NetNS(), "b-a", experimental); err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	raw, err := to.file.SyscallConn()
	must(t, err)
	var narrow error
	must(t, raw.Control(func(fd uintptr) { narrow = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) }))
	must(t, narrow)
	for range sent {
		must(t, from.Send(frame))
	}
	read = 0
	go func() {
		done <- to.Receive(make([]byte, 1500), func([]byte) { read++ })
	}()
	for range 2 {
		dropped, err := to.CaughtUp(soon(t))
		must(t, err)
		if read == 0 || dropped == 0 || read+int(dropped) != sent {
			t.Errorf("%d frames were read and %d dropped of %d that were too many", read, dropped, sent)
		}
	}
	must(t, to.Close())
	must(t, <-done)
	if _, err := to.CaughtUp(soon(t)); err == nil {
		t.Error("after Close: it has caught up")
	}
}
