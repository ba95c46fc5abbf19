package host

import (
	"errors"
	"io"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
)

// What a thread with a table of its own opens is nobody else's, and what it does not keep is closed there: the reader of a pipe sees the
// end when the process closes the other side.
func TestOwnDescriptorsAreTheThreads(t *testing.T) {
	keep, err := RuntimeDescriptors()
	must(t, err)
	if len(keep) < 4 || !slices.Contains(keep, 2) {
		t.Errorf("the runtime uses %v; want standard error, and an epoll instance and what wakes it up", keep)
	}
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	opened, done := make(chan int), make(chan struct{})
	OnThread(func() {
		defer close(done)
		if err := OwnDescriptors(keep); err != nil {
			t.Error(err)
		}
		// A number that nobody else has.
		fd, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 5000)
		if err != nil {
			t.Error(err)
		}
		opened <- fd
		<-opened
		if err := unix.Close(fd); err != nil {
			t.Errorf("close its own: %v", err)
		}
	})
	fd := <-opened
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
		t.Errorf("the thread's descriptor %d elsewhere: %v; want EBADF", fd, err)
	}
	must(t, errors.Join(w.Close(), r.SetReadDeadline(time.Now().Add(await.Limit(30*time.Second)))))
	if _, err := r.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read a pipe that the process has closed: %v; want its end", err)
	}
	opened <- fd
	<-done
}

// The process's first thread is never given away: it would not end.
func TestOnThreadIsNotTheFirst(t *testing.T) {
	for range 50 {
		first, ended := make(chan bool), make(chan int)
		for range 8 {
			OnThread(func() {
				first <- unix.Gettid() == unix.Getpid()
				<-ended
			})
		}
		for range 8 {
			if <-first {
				t.Error("a goroutine has the process's first thread")
			}
		}
		close(ended)
	}
}

// f runs in the namespace, and what it opens is not the process's.
func TestDoOnOwnDescriptors(t *testing.T) {
	ns, err := Anonymous()
	must(t, err)
	defer ns.Close()
	says := errors.New("what f says")
	err = ns.DoOnOwnDescriptors(func() error {
		if !isHere(ns.file) {
			t.Error("f runs in another namespace")
		}
		fd, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 5000)
		if err != nil {
			return err
		}
		elsewhere := make(chan error)
		go func() {
			_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
			elsewhere <- err
		}()
		if err := <-elsewhere; err != unix.EBADF {
			t.Errorf("f's descriptor elsewhere: %v; want EBADF", err)
		}
		return says
	})
	if err != says {
		t.Errorf("it gives %v; want what f gave", err)
	}
}
