package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/stream/function"
)

// What seal encrypts on r2 with a key from a file, open decrypts on r3 with the same key: links between see nothing of it. A function
// with another key resets connections, and gets the right one by its file.
func TestSealAndOpenByKeysInFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	key := func(name string, first byte) string {
		file := filepath.Join(dir, name)
		must(t, os.WriteFile(file, []byte(function.Key{first, 31: 1}.Text()+"\n"), 0o600))
		return file
	}
	lock, unlock := key("lock", 1), key("unlock", 1)
	w := build(t, strings.NewReplacer(
		"run: [{gzip: {level: 1}}]", "run: [{seal: {key: 7, file: "+lock+"}}]",
		"run: [gunzip], back: [{gzip: {level: 1}}]", "run: [{open: {key: 7, file: "+unlock+"}}]",
	).Replace(example(t, "streams.yaml")))
	const marker = "a text that nobody may read"
	seen := map[string]*recorder[bool]{}
	for _, at := range []struct{ node, link string }{{"r2", "r2-r1"}, {"r2", "r2-r3"}, {"r3", "r3-r2"}, {"r3", "r3-r6"}} {
		seen[at.link] = &recorder[bool]{}
		seen[at.link].start(w, at.node, at.link, 64<<10, func(f []byte) (bool, bool) { return true, bytes.Contains(f, []byte(marker)) })
	}
	for _, w.ipv4 = range []bool{false, true} {
		w.text("h2", "h1", strings.Repeat(marker+" ", 20_000))
		must(t, w.echoed(strings.Repeat(marker+" ", 20_000)))
	}
	w.download("h2", "h1", 5_000_000)
	for link, r := range seen {
		readable := link == "r2-r1" || link == "r3-r6" // before seal and behind open
		if n := len(r.soFar()); (n > 0) != readable {
			t.Errorf("%d frames at %s have the text; want some: %t", n, link, readable)
		}
	}

	// Another key at r3: connections are reset, and nothing comes out. The agents look at the files when they reconcile.
	key("unlock", 2)
	old, err := w.workerOf("r3", "unzip")
	must(t, err)
	replaced := func() {
		eventually(t, func() error {
			now, err := w.workerOf("r3", "unzip")
			if err == nil && now == old {
				err = errors.New("the worker has the key of before")
			}
			return err
		})
		old, err = w.workerOf("r3", "unzip")
		must(t, err)
	}
	replaced()
	if err := w.echoed(marker); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("a connection that is opened with another key: %v; want a reset", err)
	}
	key("unlock", 1)
	replaced()
	must(t, w.echoed(marker))
}

// echoed sends a text from h1 to h2, which sends it back.
func (w *world) echoed(text string) error {
	s := w.echoTCP("h2", false)
	defer s.Close()
	return w.Do("h1", func() error {
		c, err := net.DialTimeout("tcp", s.Addr().String(), settleTime)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.SetDeadline(time.Now().Add(settleTime)); err != nil {
			return err
		}
		sent := make(chan error, 1)
		go func() {
			_, err := io.WriteString(c, text)
			sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
		}()
		got, err := io.ReadAll(c)
		if err = errors.Join(err, <-sent); err == nil && string(got) != text {
			err = fmt.Errorf("%d bytes came back, and are not the %d that were sent", len(got), len(text))
		}
		return err
	})
}
