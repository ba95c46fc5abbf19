package gateway

import (
	"crypto/tls"
	"encoding/binary"
	"net"
	"time"
)

// What a client of HTTP/2 sends first, and frames by their numbers (RFC 9113 sections 3.4 and 6).
const (
	prefaceBytes = len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")

	frameData         = 0
	frameHeaders      = 1
	frameRSTStream    = 3
	framePing         = 6
	frameWindowUpdate = 8
	frameContinuation = 9

	flagACK       = 1 // of a PING
	flagEndStream = 1 // of DATA
)

// framed is a client's connection of HTTP/2, whose frames are counted as they are read. A frame costs its sender a few bytes: a stream
// that is begun and reset costs the gateway a request to the origin and two lines of the log (CVE-2023-44487), and a PING or SETTINGS
// an answer. Requests and their bodies have limits of their own.
type framed struct {
	net.Conn // of TLS: net/http takes no ConnectionState for one whose TLS is open
	frames   frameCount
	now      func() time.Time
	over     func(why error)
}

// NetConn is the connection below TLS.
func (f *framed) NetConn() net.Conn { return f.Conn.(*tls.Conn).NetConn() }

func (f *framed) Read(b []byte) (int, error) {
	n, err := f.Conn.Read(b)
	if why := f.frames.take(b[:n], f.now()); why != nil {
		f.over(why)
		return 0, why
	}
	return n, err
}

// frameWindow is the time for which Limits.Resets and Limits.ControlFrames are.
const frameWindow = time.Minute

// frameCount finds the frames in what a client sends (RFC 9113 section 4.1), and counts those that no answer and no body needs many of.
type frameCount struct {
	resetsMax, controlMax int

	preface int // bytes of it that have come
	header  [9]byte
	have    int    // bytes of the header
	skip    uint32 // bytes of the payload that have not come

	since           time.Time // of the window
	resets, control int       // in the window
}

// take reads on. The error is a Refusal.
func (f *frameCount) take(b []byte, now time.Time) error {
	if rest := prefaceBytes - f.preface; rest > 0 {
		n := min(rest, len(b))
		f.preface += n
		b = b[n:]
	}
	for len(b) > 0 {
		if f.skip > 0 {
			n := min(f.skip, uint32(len(b)))
			f.skip -= n
			b = b[n:]
			continue
		}
		n := copy(f.header[f.have:], b)
		f.have += n
		b = b[n:]
		if f.have < len(f.header) {
			continue
		}
		f.have = 0
		f.skip = binary.BigEndian.Uint32(f.header[:4]) >> 8
		if err := f.count(now); err != nil {
			return err
		}
	}
	return nil
}

// count counts the frame of the header.
func (f *frameCount) count(now time.Time) error {
	n, flags := &f.control, f.header[4]
	switch f.header[3] {
	case frameRSTStream:
		n = &f.resets
	case frameHeaders, frameContinuation, frameWindowUpdate:
		return nil // requests, and what answers need
	case frameData:
		if f.skip > 0 || flags&flagEndStream != 0 {
			return nil
		}
	case framePing:
		if flags&flagACK != 0 {
			return nil
		}
	}
	if age := now.Sub(f.since); age < 0 || age > frameWindow {
		f.since, f.resets, f.control = now, 0, 0
	}
	*n++
	switch {
	case f.resets > f.resetsMax:
		return refuse(Limit, "the client has reset %d streams in %s", f.resets, frameWindow)
	case f.control > f.controlMax:
		return refuse(Limit, "the client has sent %d frames of PING, SETTINGS, PRIORITY or without a byte in %s", f.control, frameWindow)
	}
	return nil
}
