package gateway

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A request for 1 KB by HTTP/1.1, of clients that ask again and again. Client and origin are in the same process: what origin
// takes is what they take without a gateway.
func BenchmarkRequests(b *testing.B) {
	w := newWorld(b, nil)
	w.origin.Config.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "1024")
		rw.Write(make([]byte, 1024))
	})
	alice := w.staff.client(b, "/eng/alice")
	request := "GET /page HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"
	for name, address := range map[string]string{"gateway": w.address, "origin": w.origin.Listener.Addr().String()} {
		b.Run(name, func(b *testing.B) {
			conf := w.tls(&alice, "shop.example.org", "http/1.1")
			conf.InsecureSkipVerify = name == "origin"
			const clients = 16
			var left atomic.Int64
			left.Store(int64(b.N))
			done := make(chan error, clients)
			var conns []*tls.Conn
			for range clients {
				c, err := tls.Dial("tcp", address, conf)
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				conns = append(conns, c)
			}
			before := processorTime(b)
			b.ResetTimer()
			for _, c := range conns {
				go func() {
					in := bufio.NewReader(c)
					for left.Add(-1) >= 0 {
						if err := askOnce(c, in, request); err != nil {
							done <- err
							return
						}
					}
					done <- nil
				}()
			}
			for range clients {
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(processorTime(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// processorTime is what the process has had of CPUs, also where others share them.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func askOnce(c io.Writer, in *bufio.Reader, request string) error {
	if _, err := io.WriteString(c, request); err != nil {
		return err
	}
	a, err := http.ReadResponse(in, nil)
	if err != nil {
		return err
	}
	var body bytes.Buffer
	if _, err := body.ReadFrom(a.Body); err != nil || a.StatusCode != http.StatusOK || body.Len() != 1024 {
		return fmt.Errorf("status %d and %d bytes: %v", a.StatusCode, body.Len(), err)
	}
	return nil
}

// A download of 256 MB with a length.
func BenchmarkDownload(b *testing.B) {
	const size = 256 << 20
	w := newWorld(b, nil)
	piece := make([]byte, 64<<10)
	w.origin.Config.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.RawQuery != "chunked" {
			rw.Header().Set("Content-Length", fmt.Sprint(size))
		}
		for range size / len(piece) {
			rw.Write(piece)
		}
	})
	alice := w.staff.client(b, "/eng/alice")
	for _, query := range []string{"", "?chunked"} {
		b.Run("page"+query, func(b *testing.B) {
			b.SetBytes(size)
			c, err := tls.Dial("tcp", w.address, w.tls(&alice, "shop.example.org", "http/1.1"))
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			in := bufio.NewReader(c)
			before := processorTime(b)
			for b.Loop() {
				if _, err := io.WriteString(c, "GET /page"+query+" HTTP/1.1\r\nHost: shop.example.org\r\n\r\n"); err != nil {
					b.Fatal(err)
				}
				a, err := http.ReadResponse(in, nil)
				if err != nil {
					b.Fatal(err)
				}
				if n, err := io.Copy(io.Discard, a.Body); n != size || err != nil {
					b.Fatal(n, err)
				}
			}
			b.ReportMetric(float64(processorTime(b)-before)/float64(b.N)/(size>>20), "cpu-ns/MB")
		})
	}
}
