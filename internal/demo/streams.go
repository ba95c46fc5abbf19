package demo

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/model"
)

const streamsPrologue = `
== functions on the bytes of connections ==

    h1 --- r1 --- r2 (zip) --- r3 (unzip) --- r6 --- h2     chain web, both ways: r1, zip, unzip, r6

zip and unzip end TCP connections, each in a process without any right, and open others in
the client's name: between them bytes are compressed. The chain is cut there into
parts, each with secrets and a verdict of its own.
`

// The sizes of these scenes.
const (
	streamText  = "All work and no play makes Jack a dull boy.\n"
	streamBytes = 100_000 * len(streamText)
	cutAfter    = 1 << 20 // bytes of a download that is cut off
	closedPort  = 9
)

func (s *stage) streamScenes() []scene {
	return []scene{
		{"A download is compressed on its way",
			fmt.Sprintf("h1 downloaded a text of %d bytes from h2", streamBytes),
			s.compressed},
		{"A client learns what its server says",
			fmt.Sprintf("h1 connected to port %d of h2, where nobody listens", closedPort),
			s.nobodyListens},
		{"The worker of a function is killed",
			"h1 downloaded from h2 without an end, and the process of zip got SIGKILL; then h1 downloaded the text again",
			s.killed},
	}
}

// downloaded moves a text from h2 to h1, which asks for it.
func (s *stage) downloaded(ctx context.Context) (saw string, err error) {
	text := strings.Repeat(streamText, streamBytes/len(streamText))
	started := time.Now()
	var got []byte
	err = s.connected(ctx, func(server *net.TCPConn) error {
		_, err := io.WriteString(server, text)
		return err
	}, func(client *net.TCPConn) (err error) {
		got, err = io.ReadAll(client)
		return err
	})
	if err != nil {
		return "", err
	}
	if string(got) != text {
		return "", fmt.Errorf("%d bytes came, and are not the %d that were sent", len(got), len(text))
	}
	sum := sha256.Sum256(got)
	return fmt.Sprintf("%d bytes in %.2f s, SHA-256 %x…, as sent", len(got), time.Since(started).Seconds(), sum[:6]), nil
}

// connected makes a connection from h1 to h2. What the server's end does may fail.
func (s *stage) connected(ctx context.Context, serve, use func(*net.TCPConn) error) error {
	var l net.Listener
	err := s.h2.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", netip.AddrPortFrom(s.h2Addr(), 0).String())
		return err
	})
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			c.SetDeadline(time.Now().Add(settleTime))
			err = errors.Join(serve(c.(*net.TCPConn)), c.Close())
		}
		served <- err
	}()
	err = s.h1.Do(func() error {
		c, err := (&net.Dialer{Timeout: settleTime}).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(settleTime))
		return use(c.(*net.TCPConn))
	})
	l.Close()
	if wrong := <-served; err == nil && wrong != nil {
		err = fmt.Errorf("h2: %w", wrong)
	}
	return err
}

// byteStream is what a function of kind stream has counted.
func (s *stage) byteStream(ctx context.Context, node, name string) (api.Stream, error) {
	client := s.client(node)
	defer client.Close()
	f, err := client.Function(ctx, name)
	if err != nil {
		return api.Stream{}, err
	}
	if f.Stream == nil || f.Stream.Worker == 0 {
		return api.Stream{}, fmt.Errorf("function %s of %s has no worker", name, node)
	}
	return *f.Stream, nil
}

// compressed shows that bytes are compressed between two nodes alone, and every part of the way
// back is verified.
func (s *stage) compressed(ctx context.Context) (saw []string, err error) {
	line, err := s.downloaded(ctx)
	if err != nil {
		return nil, err
	}
	saw = append(saw, line)
	unzip, err := s.byteStream(ctx, "r3", "unzip")
	if err != nil {
		return saw, err
	}
	zip, err := s.byteStream(ctx, "r2", "zip")
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("unzip got %d bytes from h2 and sent %d on; zip got %d and sent %d to h1",
		unzip.ToClient.In, unzip.ToClient.Out, zip.ToClient.In, zip.ToClient.Out))
	if unzip.ToClient.In != uint64(streamBytes) || zip.ToClient.Out != uint64(streamBytes) || zip.ToClient.In > uint64(streamBytes/10) {
		return saw, errors.New("want all of them compressed, to a tenth at most")
	}
	parts := 0
	for _, p := range s.plan.Paths {
		if p.Chain != "web" || p.Direction != model.Reverse {
			continue
		}
		parts++
		line, err := s.sameCounts(ctx, p)
		saw = append(saw, line)
		if err != nil {
			return saw, err
		}
	}
	if parts != 3 {
		return saw, fmt.Errorf("the way back has %d parts, want 3", parts)
	}
	return saw, nil
}

// nobodyListens shows that a client is answered by its server.
func (s *stage) nobodyListens(ctx context.Context) (saw []string, err error) {
	started := time.Now()
	err = s.h1.Do(func() error {
		c, err := (&net.Dialer{Timeout: settleTime}).DialContext(ctx, "tcp", netip.AddrPortFrom(s.h2Addr(), closedPort).String())
		if err == nil {
			c.Close()
		}
		return err
	})
	if !errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("port %d: %w; want it refused", closedPort, err)
	}
	return []string{fmt.Sprintf("port %d: connection refused after %.1f ms", closedPort, time.Since(started).Seconds()*1000)}, nil
}

// killed shows that a stream that is cut off does not look complete.
func (s *stage) killed(ctx context.Context) (saw []string, err error) {
	before, err := s.byteStream(ctx, "r2", "zip")
	if err != nil {
		return nil, err
	}
	var got int64
	var end error
	err = s.connected(ctx, func(server *net.TCPConn) error {
		for {
			if _, err := io.WriteString(server, streamText); err != nil {
				return nil // it is cut off here, too
			}
		}
	}, func(client *net.TCPConn) error {
		if got, end = io.CopyN(io.Discard, client, cutAfter); end != nil {
			return end
		}
		if err := unix.Kill(before.Worker, unix.SIGKILL); err != nil {
			return fmt.Errorf("kill the worker of zip: %w", err)
		}
		more, err := io.Copy(io.Discard, client)
		got, end = got+more, err
		return nil
	})
	if err != nil {
		return nil, err
	}
	if !errors.Is(end, unix.ECONNRESET) {
		return nil, fmt.Errorf("h1 got %d bytes, and then %w; want a reset", got, end)
	}
	saw = append(saw, fmt.Sprintf("h1 got %d bytes, and then a reset, which no end of a stream looks like", got))
	after, err := s.restarted(ctx, before.Worker)
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("r2 has started zip again: %d restart", after.Restarts))
	line, err := s.downloaded(ctx)
	return append(saw, line), err
}

// restarted waits until zip has another worker.
func (s *stage) restarted(ctx context.Context, old int) (api.Stream, error) {
	deadline := time.Now().Add(settleTime)
	for {
		now, err := s.byteStream(ctx, "r2", "zip")
		if err == nil && now.Worker != old {
			return now, nil
		}
		if time.Now().After(deadline) {
			return now, errors.Join(errors.New("zip has no other worker"), err)
		}
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return now, err
		}
	}
}
