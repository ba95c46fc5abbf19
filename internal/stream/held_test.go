package stream

import (
	"bytes"
	"encoding/hex"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// SYNs to port 9, with options and without, the RSTs that answer them (RFC 9293 section
// 3.10.7.1), and the ICMP errors that say that the way there is prohibited, as Scapy makes them.
var refusals = []struct{ name, syn, rst, prohibited string }{
	{
		"IPv6",
		"02000000000102000000000286dd6000000000280640fc000007000000000000000000000002fc0000080000000000000000000000029c4000090000006400000000a002fd20b6300000020405a00402080a000000010000000001030307",
		"02000000000102000000000286dd6000000000140640fc000008000000000000000000000002fc00000700000000000000000000000200099c400000000000000065501400001b0e0000",
		"02000000000102000000000286dd6000000000583a40fc000008000000000000000000000002fc0000070000000000000000000000020101a01d000000006000000000280640fc000007000000000000000000000002fc0000080000000000000000000000029c4000090000006400000000a002fd20b6300000020405a00402080a000000010000000001030307",
	},
	{
		"IPv4",
		"0200000000010200000000020800450000280000400040064e98c0000202c63364029c40000900000064000000005002200006fd0000",
		"0200000000010200000000020800450000280000400040064e98c6336402c000020200099c4000000000000000655014000026ea0000",
		"0200000000010200000000020800450000440000400040014e81c6336402c0000202030de94500000000450000280000400040064e98c0000202c63364029c40000900000064000000005002200006fd0000",
	},
}

func TestARefusalIsWhatAHostSays(t *testing.T) {
	for _, c := range refusals {
		t.Run(c.name, func(t *testing.T) {
			syn, err := hex.DecodeString(c.syn)
			must(t, err)
			want, err := hex.DecodeString(c.rst)
			must(t, err)
			s, ok := readSegment(syn)
			if !ok || !s.opens() {
				t.Fatalf("it is no SYN: %v", s)
			}
			hold := Hold{Node: [6]byte{2, 0, 0, 0, 0, 1}, Worker: [6]byte{2, 0, 0, 0, 0, 2}}
			if got := s.refusal(hold); !bytes.Equal(got, want) {
				t.Errorf("%x\nwant\n%x", got, want)
			}
			want, err = hex.DecodeString(c.prohibited)
			must(t, err)
			if got := s.unreachable(hold, unix.EACCES); !bytes.Equal(got, want) {
				t.Errorf("%x\nwant\n%x", got, want)
			}
			if got := s.unreachable(hold, unix.ETIMEDOUT); got != nil {
				t.Errorf("a server that is silent: %x; want nothing", got)
			}
		})
	}
}

// A frame of any bytes does no harm, and one that is taken can be answered.
func FuzzReadSegment(f *testing.F) {
	for _, c := range refusals {
		b, err := hex.DecodeString(c.syn)
		must(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, ok := readSegment(b)
		if !ok {
			return
		}
		s.opens()
		s.check()
		back, ok := readSegment(s.refusal(Hold{}))
		if !ok || back.client != s.server || back.server != s.client {
			t.Errorf("%x: its refusal is from %v to %v", b, back.client, back.server)
		}
		if n := len(s.unreachable(Hold{}, unix.EHOSTUNREACH)); n > etherLen+1280 {
			t.Errorf("%x: the error about it has %d bytes", b, n)
		}
	})
}

// Where too many wait, the one gives way that has waited longest for a server; those whose servers
// have answered stay.
func TestOneThatWaitsGivesWay(t *testing.T) {
	memory, err := NewStatistics()
	must(t, err)
	defer memory.Close()
	w := &Worker{config: &Config{}, held: -1}
	l := &loop{w: w, words: loopWords(memory, 0), waiting: map[ends]uint32{}, known: &known{}}
	var conns []*conn
	for i, connecting := range []bool{false, true, true, true} {
		c := l.newConn()
		c.connecting = connecting
		c.wait = &waiting{ends: ends{netip.AddrPortFrom(client6, uint16(i)), towards["IPv6"]}, began: []uint32{1, 7, 5, 9}[i]}
		l.waiting[c.wait.ends] = c.number
		l.known.add(c.wait.ends, 0)
		conns = append(conns, c)
	}
	left := func() (open []int) {
		for i, c := range conns {
			if c.open {
				open = append(open, i)
			}
		}
		return open
	}
	for _, want := range [][]int{{0, 1, 3}, {0, 3}, {0}} {
		l.giveUpOne()
		if got := left(); !slices.Equal(got, want) || len(l.waiting) != len(want) {
			t.Fatalf("%v wait; want %v", got, want)
		}
	}
}
