package stream

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Where a process may have fewer descriptors than a worker's connections take, each event loop has a table of descriptors of its own,
// on its own thread (host.OwnDescriptors): the limit is one of a table. A number means another file in each, so that no descriptor
// goes from loop to loop. Sealed connections do not fit: goroutines on any thread read and write them.

// loopsFor is how many event loops connections need if each has descriptors for room of them. The ends of connections choose
// the loop, so that some have more than others: a part of the room is left for that.
func loopsFor(connections int, room uint64) int {
	usable := int(min(room-room/apartSpare, ConnectionsMax))
	if usable < 1 {
		return 1
	}
	return min((connections+usable-1)/usable, LoopsMax)
}

// apartSpare: one in this number of a loop's descriptors is not counted on.
const apartSpare = 8

// do calls f on the loop's own thread, if it has one.
func (l *loop) do(f func()) {
	if l.thread == nil {
		f()
		return
	}
	done := make(chan struct{})
	l.thread <- func() {
		defer close(done)
		f()
	}
	<-done
}

// setApart gives each loop a thread with a table of descriptors of its own. others are what all threads need,
// see host.RuntimeDescriptors; first is what the first loop needs beside them. The process's own table loses
// what only loops use: a listener is closed once no table has it.
func (w *Worker) setApart(others []int, first ...int) error {
	shared := slices.Clone(others)
	for _, l := range w.loops {
		shared = append(shared, l.wake)
	}
	if w.held >= 0 {
		shared = append(shared, w.held)
	}
	w.apart = true
	for i, l := range w.loops {
		l.thread = make(chan func())
		host.OnThread(func() { // whose table ends with it
			for f := range l.thread {
				f()
			}
		})
		keep := append(slices.Clone(shared), l.epoll, l.spare)
		keep = append(keep, l.listeners...)
		if i == 0 {
			keep = append(keep, first...)
		}
		var err error
		l.do(func() { err = host.OwnDescriptors(keep) })
		if err != nil {
			return err
		}
	}
	for _, l := range w.loops {
		for _, fd := range append(slices.Clone(l.listeners), l.epoll, l.spare) {
			unix.Close(fd)
		}
	}
	return nil
}

// endThread ends the loop's own thread, once the loop is closed. wake is the process's own descriptor to wake it up by.
func (l *loop) endThread(wake int) {
	if l.thread != nil {
		close(l.thread)
		l.thread = nil
		unix.Close(wake)
	}
}
