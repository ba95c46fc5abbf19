package stream

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/seal"
)

// blocking is a socket that blocks its thread: what it costs is the thread's own.
type blocking struct {
	net.Conn // for what is not used
	fd       int
}

func (b *blocking) Read(p []byte) (int, error) {
	for {
		n, err := syscall.Read(b.fd, p)
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

func (b *blocking) Write(p []byte) (int, error) {
	for done := 0; ; {
		n, err := syscall.Write(b.fd, p[done:])
		switch {
		case err == syscall.EINTR:
			continue
		case err != nil:
			return done, os.NewSyscallError("write", err)
		}
		if done += n; done == len(p) {
			return done, nil
		}
	}
}

func (b *blocking) Close() error                     { return syscall.Shutdown(b.fd, syscall.SHUT_RDWR) }
func (b *blocking) SetDeadline(time.Time) error      { return nil }
func (b *blocking) SetReadDeadline(time.Time) error  { return nil }
func (b *blocking) SetWriteDeadline(time.Time) error { return nil }

// socketPair is a TCP connection on lo: both ends.
func socketPair(b *testing.B) (one, two *blocking) {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	d, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	a, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	of := func(c net.Conn) *blocking {
		f, err := c.(*net.TCPConn).File()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { f.Close() })
		c.Close()
		fd := int(f.Fd())
		if err := syscall.SetNonblock(fd, false); err != nil {
			b.Fatal(err)
		}
		return &blocking{fd: fd}
	}
	return of(d), of(a)
}

// batching reads as much as there is at once, and writes at once what was written until the other connection has nothing more.
type batching struct {
	net.Conn
	r     *bufio.Reader
	w     *bufio.Writer
	waits func() error // before a read that may wait; nil: nothing
	held  bool         // writes wait for that
}

func (c *batching) Read(p []byte) (int, error) {
	if c.waits != nil && c.r.Buffered() == 0 {
		if err := c.waits(); err != nil {
			return 0, err
		}
	}
	return c.r.Read(p)
}

func (c *batching) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	if err == nil && !c.held {
		err = c.w.Flush()
	}
	return n, err
}

// What opens and seals again, beside what a record layer of our own could take at least: AES-GCM in place, 256 KB a system
// call, and nothing else. Only the thread in the middle is measured.
const (
	recordBytes = 16 << 10                 // payload of a record
	recordWire  = 5 + recordBytes + 1 + 16 // RFC 8446 section 5.2: header, type, tag
	together    = 16                       // records
)

func threadTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(1, &u); err != nil { // RUSAGE_THREAD
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkMiddle(b *testing.B) {
	const each = 64 << 20 // bytes of an operation
	run := func(b *testing.B, middle func() error) {
		done := make(chan error, 1)
		var took time.Duration
		go func() {
			runtime.LockOSThread()
			before := threadTime(b)
			err := middle()
			took = threadTime(b) - before
			done <- err
		}()
		if err := <-done; err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(took.Seconds()/float64(b.N)*(1<<30)/each, "cpu-s/GiB")
		b.ReportMetric(0, "ns/op")
	}
	for _, batched := range []bool{false, true} {
		name := "crypto-tls"
		if batched {
			name += "-batched"
		}
		b.Run(name, func(b *testing.B) {
			var ends [4]*seal.Conn
			var batches [2]*batching
			for i := range 2 {
				dials, accepts := keysOfPart(b)
				x, y := socketPair(b)
				var d, a net.Conn = x, y
				if batched {
					own := []*net.Conn{&a, &d}[i]
					batches[i] = &batching{Conn: *own, r: bufio.NewReaderSize(*own, together*recordWire), w: bufio.NewWriterSize(*own, together*recordWire)}
					*own = batches[i]
				}
				done := make(chan error, 1)
				go func() {
					c, err := dials.Dial(context.Background(), d, "shop", seal.HTTP1)
					ends[2*i] = c
					done <- err
				}()
				c, _, err := accepts.Accept(context.Background(), a)
				if err == nil {
					err = c.Answer(context.Background(), seal.Answer{})
				}
				if err != nil {
					b.Fatal(err)
				}
				ends[2*i+1] = c
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			if batched {
				batches[0].waits, batches[1].held = batches[1].w.Flush, true
			}
			total := b.N * each
			go func() {
				for buf, n := make([]byte, together*recordBytes), 0; n < total; n += len(buf) {
					if _, err := ends[0].Write(buf); err != nil {
						return
					}
				}
			}()
			go io.Copy(io.Discard, ends[3])
			run(b, func() error {
				buf := make([]byte, recordBytes)
				for n := 0; n < total; {
					k, err := ends[1].Read(buf)
					if err != nil {
						return err
					}
					if _, err := ends[2].Write(buf[:k]); err != nil {
						return err
					}
					n += k
				}
				return nil
			})
		})
	}
	b.Run("in-place", func(b *testing.B) {
		from, in := socketPair(b)
		out, to := socketPair(b)
		aead := func() cipher.AEAD {
			block, err := aes.NewCipher(make([]byte, 16))
			if err != nil {
				b.Fatal(err)
			}
			a, err := cipher.NewGCM(block)
			if err != nil {
				b.Fatal(err)
			}
			return a
		}
		sealed := func(a cipher.AEAD, number uint64, record []byte) {
			var nonce [12]byte
			binary.BigEndian.PutUint64(nonce[4:], number)
			copy(record, []byte{23, 3, 3, (recordWire - 5) >> 8, (recordWire - 5) & 0xff})
			a.Seal(record[5:5], nonce[:], record[5:recordWire-16], record[:5])
		}
		total := b.N * each
		go func() {
			a, buf := aead(), make([]byte, together*recordWire)
			for n, number := 0, uint64(0); n < total; n += together * recordBytes {
				for i := range together {
					sealed(a, number, buf[i*recordWire:(i+1)*recordWire])
					number++
				}
				if _, err := from.Write(buf); err != nil {
					return
				}
			}
		}()
		go io.Copy(io.Discard, to)
		run(b, func() error {
			open, again := aead(), aead()
			buf := make([]byte, together*recordWire)
			number, have := uint64(0), 0
			for n := 0; n < total; {
				k, err := in.Read(buf[have:])
				if err != nil {
					return err
				}
				have += k
				whole := have / recordWire
				for i := range whole {
					var nonce [12]byte
					binary.BigEndian.PutUint64(nonce[4:], number)
					record := buf[i*recordWire : (i+1)*recordWire]
					if _, err := open.Open(record[5:5], nonce[:], record[5:], record[:5]); err != nil {
						return err
					}
					sealed(again, number, record)
					number++
				}
				if _, err := out.Write(buf[:whole*recordWire]); err != nil {
					return err
				}
				n += whole * recordBytes
				have = copy(buf, buf[whole*recordWire:have])
			}
			return nil
		})
	})
}
