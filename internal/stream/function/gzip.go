package function

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"sync/atomic"
)

// gzipStep is how much a compressor is given at once; what comes out of that is held
// until there is room.
const gzipStep = 16 << 10

// deflatersKept bounds the compressors that are kept for the next connection. One takes
// some 800 KB.
const deflatersKept = 8

// compress makes a gzip file (RFC 1952) of the bytes of a direction. Where input pauses, it
// ends the file's member, so that everything has gone and nothing is held; the next bytes
// begin another member. A file of several members is one file (section 2.2).
type compress struct {
	level int
	free  []*deflater
}

type deflater struct {
	writer *gzip.Writer
	out    bytes.Buffer // compressed, and not yet taken
	ended  bool         // the member's trailer is in out
}

func parseGzip(raw json.RawMessage) (Entry, error) {
	set := struct {
		Level int `json:"level"`
	}{Level: 1}
	if err := settingsOf(raw, &set); err != nil {
		return Entry{}, err
	}
	if set.Level < gzip.BestSpeed || set.Level > gzip.BestCompression {
		return Entry{}, fmt.Errorf("level is %d; expect %d to %d", set.Level, gzip.BestSpeed, gzip.BestCompression)
	}
	return gzipEntry(set.Level), nil
}

func gzipEntry(level int) Entry {
	return Entry{
		Name: "gzip",
		make: func(Surroundings) (Function, error) { return &compress{level: level}, nil },
		back: func() Entry { return gunzipEntry(level) },
	}
}

// gunzipEntry remembers the level of its inverse.
func gunzipEntry(level int) Entry {
	return Entry{
		Name: "gunzip",
		make: func(s Surroundings) (Function, error) { return &decompress{event: s.Event}, nil },
		back: func() Entry { return gzipEntry(level) },
	}
}

func parseGunzip(raw json.RawMessage) (Entry, error) {
	if err := settingsOf(raw, &struct{}{}); err != nil {
		return Entry{}, err
	}
	return gunzipEntry(1), nil
}

func (f *compress) Open(Connection) Handler { return Handler{Transform: &compressing{f: f}} }

// compressing is one direction of one connection.
type compressing struct {
	f *compress
	d *deflater // nil between members
}

func (c *compressing) Transform(in []byte, at Moment, out []byte) (n int, _ []byte, _ Verdict) {
	for {
		if c.d != nil {
			if out = c.d.take(out); c.d.out.Len() > 0 {
				return n, out, Full
			}
			if c.d.ended {
				c.Close()
			}
		}
		switch {
		case n < len(in):
			if c.d == nil {
				c.d = c.f.deflater()
			}
			k := min(len(in)-n, gzipStep)
			if _, err := c.d.writer.Write(in[n : n+k]); err != nil {
				return n, out, Reset // a bytes.Buffer has no errors
			}
			n += k
		case at != More && c.d != nil:
			if err := c.d.writer.Close(); err != nil {
				return n, out, Reset
			}
			c.d.ended = true
		default:
			return n, out, Continue
		}
	}
}

func (f *compress) deflater() *deflater {
	if n := len(f.free); n > 0 {
		d := f.free[n-1]
		f.free = f.free[:n-1]
		d.out.Reset()
		d.writer.Reset(&d.out)
		d.ended = false
		return d
	}
	d := &deflater{}
	d.writer, _ = gzip.NewWriterLevel(&d.out, f.level) // the level was checked
	return d
}

// take moves output to out, as far as there is room.
func (d *deflater) take(out []byte) []byte {
	return append(out, d.out.Next(cap(out)-len(out))...)
}

func (c *compressing) Close() {
	if c.d != nil && len(c.f.free) < deflatersKept {
		c.f.free = append(c.f.free, c.d)
	}
	c.d = nil
}

// decompress reads gzip files (RFC 1952), of one member or several. What is none, is
// damaged, or ends before its time resets the connection.
type decompress struct {
	event *atomic.Uint64
	free  []*inflater
}

// inflatersKept bounds the decompressors that are kept; one takes some 40 KB.
const inflatersKept = 64

func (f *decompress) Open(Connection) Handler { return Handler{Transform: &decompressing{f: f}} }

type decompressing struct {
	f *decompress
	i *inflater // nil between members
}

func (c *decompressing) Transform(in []byte, at Moment, out []byte) (n int, _ []byte, _ Verdict) {
	for {
		if c.i == nil {
			if n == len(in) {
				return n, out, Continue
			}
			c.i = c.f.inflater()
		}
		k, grown, done, err := c.i.inflate(in[n:], out)
		n, out = n+k, grown
		switch {
		case err != nil || at == End && !done && n == len(in) && len(out) < cap(out):
			if c.f.event != nil {
				c.f.event.Add(1)
			}
			return n, out, Reset
		case done:
			c.Close()
		case len(out) == cap(out):
			return n, out, Full
		default:
			return n, out, Continue
		}
	}
}

func (f *decompress) inflater() *inflater {
	if n := len(f.free); n > 0 {
		i := f.free[n-1]
		f.free = f.free[:n-1]
		i.reset()
		return i
	}
	return &inflater{}
}

func (c *decompressing) Close() {
	if c.i != nil && len(c.f.free) < inflatersKept {
		c.f.free = append(c.f.free, c.i)
	}
	c.i = nil
}
