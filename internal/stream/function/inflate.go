package function

import (
	"errors"
	"hash/crc32"
	"math/bits"
)

// inflater decompresses one member of a gzip file (RFC 1952, RFC 1951), from input that
// comes in pieces of any size and into room of any size. It stops anywhere and goes on
// later, which compress/flate does not: that reads from an io.Reader, and an error to stop
// it is final.
type inflater struct {
	state inflateState
	err   error

	// The bits that are not used yet, from the lowest on.
	hold  uint64
	count uint

	flags   byte
	skip    int  // bytes of the header's extra field that are left
	final   bool // this is the last block
	stored  int  // bytes of a stored block that are left
	length  int  // bytes of a copy that are left
	dist    int
	lengths [286 + 32]uint8
	nlen    int
	ndist   int
	ncode   int
	have    int // code lengths that are read
	lit     huffman
	distant huffman
	codes   huffman

	window [windowSize]byte // the last bytes that came out
	at     int              // where the next goes
	filled int              // bytes in window
	sum    uint32           // of what came out, and how much that is
	size   uint32

	wantSum, wantSize uint32 // what the file says
}

const windowSize = 32 << 10

type inflateState uint8

const (
	inHeader inflateState = iota
	inTime
	inSystem
	inExtra // length of FEXTRA
	inExtraSkip
	inName
	inComment
	inHeaderSum
	inBlock  // the first bits of a block
	inStored // its length
	inStoredBytes
	inTable // sizes of a dynamic block's tables
	inCodeLengths
	inLengths
	inSymbol
	inDistance
	inCopy
	inSum
	inSize
	inDone
)

var (
	errNotGzip = errors.New("not a gzip file (RFC 1952)")
	errDeflate = errors.New("damaged deflate stream (RFC 1951)")
	errSum     = errors.New("checksum or length of the gzip file is wrong")
	errMore    = errors.New("more input is needed")
	errRoom    = errors.New("more room is needed")
)

func (f *inflater) reset() {
	f.state, f.err = inHeader, nil
	f.hold, f.count = 0, 0
	f.at, f.filled, f.sum, f.size = 0, 0, 0, 0
	f.final = false
}

// inflate appends what in decompresses to to out, within its capacity. done: the member
// has ended, and in[n:] is not part of it.
func (f *inflater) inflate(in, out []byte) (n int, _ []byte, done bool, err error) {
	if f.err != nil {
		return 0, out, false, f.err
	}
	from := len(out)
	r := bitReader{in: in, hold: f.hold, count: f.count}
	for err == nil && f.state != inDone {
		out, err = f.next(&r, out, from)
	}
	f.hold, f.count = r.hold, r.count
	f.keep(out[from:])
	switch {
	case err == errMore || err == errRoom:
		err = nil
	case err == nil: // the end
		if f.wantSum != f.sum || f.wantSize != f.size {
			err = errSum
		}
	}
	f.err = err
	return r.n, out, f.state == inDone && err == nil, err
}

// keep takes what came out into the window and the checksum.
func (f *inflater) keep(p []byte) {
	f.sum = crc32.Update(f.sum, crc32.IEEETable, p)
	f.size += uint32(len(p))
	f.filled = min(f.filled+len(p), windowSize)
	if len(p) > windowSize {
		p = p[len(p)-windowSize:]
	}
	for len(p) > 0 {
		n := copy(f.window[f.at:], p)
		p = p[n:]
		f.at = (f.at + n) % windowSize
	}
}

// bitReader reads bits from the lowest of each byte on.
type bitReader struct {
	in    []byte
	n     int // bytes of in that are in hold
	hold  uint64
	count uint
}

// need makes sure that there are k bits, at most 32, and takes no byte more than that.
func (r *bitReader) need(k uint) bool {
	for r.count < k {
		if r.n == len(r.in) {
			return false
		}
		r.hold |= uint64(r.in[r.n]) << r.count
		r.n++
		r.count += 8
	}
	return true
}

// fill takes what there is room for: up to seven bytes more than a symbol needs. A
// member has eight bytes behind its last symbol, so these are never another member's.
func (r *bitReader) fill() {
	for r.count <= 56 && r.n < len(r.in) {
		r.hold |= uint64(r.in[r.n]) << r.count
		r.n++
		r.count += 8
	}
}

func (r *bitReader) take(k uint) uint32 {
	v := uint32(r.hold & (1<<k - 1))
	r.hold >>= k
	r.count -= k
	return v
}

// next does one step, and changes nothing if it returns errMore or errRoom but that all of
// the input is in r.
func (f *inflater) next(r *bitReader, out []byte, from int) ([]byte, error) {
	switch f.state {
	case inHeader: // ID1, ID2, CM, FLG
		if !r.need(32) {
			return out, errMore
		}
		h := r.take(32)
		if h&0xffffff != 0x088b1f || h>>29 != 0 {
			return out, errNotGzip
		}
		f.flags, f.state = byte(h>>24), inTime
	case inTime: // MTIME, then XFL and OS
		if !r.need(32) {
			return out, errMore
		}
		r.take(32)
		f.state = inSystem
	case inSystem:
		if !r.need(16) {
			return out, errMore
		}
		r.take(16)
		f.state = inExtra
	case inExtra:
		f.skip = 0
		if f.flags&4 != 0 {
			if !r.need(16) {
				return out, errMore
			}
			f.skip = int(r.take(16))
		}
		f.state = inExtraSkip
	case inExtraSkip:
		for ; f.skip > 0; f.skip-- {
			if !r.need(8) {
				return out, errMore
			}
			r.take(8)
		}
		f.state = inName
	case inName, inComment: // each ends with a zero
		if f.state == inName && f.flags&8 != 0 || f.state == inComment && f.flags&16 != 0 {
			for {
				if !r.need(8) {
					return out, errMore
				}
				if r.take(8) == 0 {
					break
				}
			}
		}
		f.state++
	case inHeaderSum:
		if f.flags&2 != 0 {
			if !r.need(16) {
				return out, errMore
			}
			r.take(16) // the data has a checksum of its own
		}
		f.state = inBlock

	case inBlock:
		if f.final {
			r.take(r.count % 8)
			f.state = inSum
			return out, nil
		}
		if !r.need(3) {
			return out, errMore
		}
		f.final = r.take(1) == 1
		switch r.take(2) {
		case 0:
			f.state = inStored
		case 1:
			f.fixed()
			f.state = inSymbol
		case 2:
			f.state = inTable
		default:
			return out, errDeflate
		}
	case inStored:
		r.take(r.count % 8)
		if !r.need(32) {
			return out, errMore
		}
		v := r.take(32)
		if v>>16 != ^v&0xffff {
			return out, errDeflate
		}
		f.stored, f.state = int(v&0xffff), inStoredBytes
	case inStoredBytes:
		for f.stored > 0 {
			if len(out) == cap(out) {
				return out, errRoom
			}
			if r.count >= 8 {
				out = append(out, byte(r.take(8)))
				f.stored--
				continue
			}
			k := min(f.stored, len(r.in)-r.n, cap(out)-len(out))
			if k == 0 {
				return out, errMore
			}
			out = append(out, r.in[r.n:r.n+k]...)
			r.n += k
			f.stored -= k
		}
		f.state = inBlock

	case inTable:
		if !r.need(14) {
			return out, errMore
		}
		f.nlen, f.ndist, f.ncode = int(r.take(5))+257, int(r.take(5))+1, int(r.take(4))+4
		if f.nlen > 286 || f.ndist > 30 {
			return out, errDeflate
		}
		clear(f.lengths[:19])
		f.have, f.state = 0, inCodeLengths
	case inCodeLengths:
		for ; f.have < f.ncode; f.have++ {
			if !r.need(3) {
				return out, errMore
			}
			f.lengths[codeOrder[f.have]] = uint8(r.take(3))
		}
		if !f.codes.build(f.lengths[:19]) {
			return out, errDeflate
		}
		f.have, f.state = 0, inLengths
	case inLengths:
		if err := f.readLengths(r); err != nil {
			return out, err
		}
		// Without an end of the block there is none.
		if f.lengths[256] == 0 || !f.lit.build(f.lengths[:f.nlen]) || !f.distant.build(f.lengths[f.nlen:f.nlen+f.ndist]) {
			return out, errDeflate
		}
		f.state = inSymbol

	case inSymbol:
		for {
			if len(out) == cap(out) {
				return out, errRoom
			}
			r.fill()
			symbol, k, err := f.lit.decode(r)
			if err != nil {
				return out, err
			}
			if symbol < 256 {
				r.take(k)
				out = append(out, byte(symbol))
				continue
			}
			if symbol == 256 {
				r.take(k)
				f.state = inBlock
				return out, nil
			}
			if symbol > 285 {
				return out, errDeflate
			}
			extra := uint(lengthExtra[symbol-257])
			if r.count < k+extra {
				return out, errMore
			}
			r.take(k)
			f.length = int(lengthBase[symbol-257]) + int(r.take(extra))
			f.state = inDistance
			return out, nil
		}
	case inDistance:
		r.fill()
		symbol, k, err := f.distant.decode(r)
		if err != nil {
			return out, err
		}
		if symbol > 29 {
			return out, errDeflate
		}
		extra := uint(0)
		if symbol >= 4 {
			extra = uint(symbol)/2 - 1
		}
		if r.count < k+extra {
			return out, errMore
		}
		r.take(k)
		f.dist = int(distanceBase[symbol]) + int(r.take(extra))
		if f.dist > f.filled+len(out)-from {
			return out, errDeflate
		}
		f.state = inCopy
	case inCopy:
		for f.length > 0 {
			k := min(f.length, cap(out)-len(out))
			if k == 0 {
				return out, errRoom
			}
			if fresh := len(out) - from; f.dist > fresh { // out of an earlier call
				at := (f.at - (f.dist - fresh) + windowSize) % windowSize
				k = min(k, f.dist-fresh, windowSize-at)
				out = append(out, f.window[at:at+k]...)
			} else {
				k = min(k, f.dist) // what repeats is copied once it is there
				out = append(out, out[len(out)-f.dist:len(out)-f.dist+k]...)
			}
			f.length -= k
		}
		f.state = inSymbol

	case inSum:
		if !r.need(32) {
			return out, errMore
		}
		f.wantSum, f.state = r.take(32), inSize
	case inSize:
		if !r.need(32) {
			return out, errMore
		}
		f.wantSize, f.state = r.take(32), inDone
	}
	return out, nil
}

// readLengths reads the lengths of the codes of a dynamic block (RFC 1951 section
// 3.2.7).
func (f *inflater) readLengths(r *bitReader) error {
	for f.have < f.nlen+f.ndist {
		r.fill()
		symbol, k, err := f.codes.decode(r)
		if err != nil {
			return err
		}
		if symbol < 16 {
			r.take(k)
			f.lengths[f.have] = uint8(symbol)
			f.have++
			continue
		}
		extra, times, value := uint(2), 3, uint8(0)
		switch symbol {
		case 16:
			if f.have == 0 {
				return errDeflate
			}
			value = f.lengths[f.have-1]
		case 17:
			extra = 3
		case 18:
			extra, times = 7, 11
		}
		if r.count < k+extra {
			return errMore
		}
		r.take(k)
		times += int(r.take(extra))
		if f.have+times > f.nlen+f.ndist {
			return errDeflate
		}
		for range times {
			f.lengths[f.have] = value
			f.have++
		}
	}
	return nil
}

// fixed makes the codes of a block without tables (RFC 1951 section 3.2.6).
func (f *inflater) fixed() {
	var l [288]uint8
	for i := range l {
		switch {
		case i < 144:
			l[i] = 8
		case i < 256:
			l[i] = 9
		case i < 280:
			l[i] = 7
		default:
			l[i] = 8
		}
	}
	f.lit.build(l[:])
	for i := range 32 { // of which the last two are not used
		l[i] = 5
	}
	f.distant.build(l[:32])
}

const (
	codeMax   = 15 // bits of a code
	tableBits = 9
)

// huffman decodes canonical codes (RFC 1951 section 3.2.2): short ones by a table, others
// bit by bit.
type huffman struct {
	table   [1 << tableBits]uint16 // symbol<<4 | length, by the next bits; 0: a longer code
	counts  [codeMax + 1]uint16    // codes by their length
	symbols [288]uint16            // by length, then by value
}

// build returns false if the lengths make no code.
func (h *huffman) build(lengths []uint8) bool {
	clear(h.table[:])
	clear(h.counts[:])
	used := 0
	for _, l := range lengths {
		h.counts[l]++
		if l > 0 {
			used++
		}
	}
	h.counts[0] = 0
	left := 1
	var first, offset [codeMax + 2]int // the first code of each length, and the place of its symbol
	for l := 1; l <= codeMax; l++ {
		left = left<<1 - int(h.counts[l])
		if left < 0 {
			return false
		}
		first[l+1] = (first[l] + int(h.counts[l])) << 1
		offset[l+1] = offset[l] + int(h.counts[l])
	}
	// A code may be incomplete only if it has one symbol of one bit, or none.
	if left > 0 && (used > 1 || used == 1 && h.counts[1] != 1) {
		return false
	}
	for symbol, l := range lengths {
		if l == 0 {
			continue
		}
		h.symbols[offset[l]] = uint16(symbol)
		offset[l]++
		code := first[l]
		first[l]++
		if l <= tableBits {
			low := int(bits.Reverse16(uint16(code)) >> (16 - l))
			for i := low; i < len(h.table); i += 1 << l {
				h.table[i] = uint16(symbol)<<4 | uint16(l)
			}
		}
	}
	return true
}

// decode returns the next symbol and the length of its code, and takes nothing. There
// may be fewer bits than the longest code has: the last symbol may be short.
func (h *huffman) decode(r *bitReader) (symbol int, length uint, err error) {
	if e := h.table[r.hold&(1<<tableBits-1)]; e != 0 {
		if length = uint(e & 15); length > r.count {
			return 0, 0, errMore
		}
		return int(e >> 4), length, nil
	}
	code, first, index := 0, 0, 0
	for l := uint(1); l <= codeMax; l++ {
		if l > r.count {
			return 0, 0, errMore
		}
		code |= int(r.hold >> (l - 1) & 1)
		n := int(h.counts[l])
		if code-first < n {
			return int(h.symbols[index+code-first]), l, nil
		}
		index += n
		first = (first + n) << 1
		code <<= 1
	}
	return 0, 0, errDeflate
}

var (
	codeOrder    = [19]uint8{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}
	lengthBase   = [29]uint16{3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258}
	lengthExtra  = [29]uint8{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0}
	distanceBase = [30]uint16{1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145,
		8193, 12289, 16385, 24577}
)
