package dataplane

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/internal/tables"
	"github.com/waystamp/waystamp/internal/tables/xtest"
	"github.com/waystamp/waystamp/test/packets"
)

// A flood of what is answered is answered a few times, and those who must be told
// of sizes are told all the same.
func TestErrorsAreFew(t *testing.T) {
	n := scapyNode(t, "r1")
	const atOnce = 5
	r := newRig(t, rigSpec{
		name: "r1", block: n.Block, locator: n.Locator, address: n.Address, own: n.Local,
		errors: [2]uint64{uint64(time.Hour), uint64(atOnce * time.Hour)}, // none comes back while the test runs
	})
	r.must(r.apply(&n.Node))
	send := func(name string, times int) (sent int) {
		t.Helper()
		p, err := packets.Load(name)
		r.must(err)
		r.must(r.in(func() error {
			for range times {
				got, err := r.runTC(frame{port: p.Interface.Name, b: p.Frame})
				if err != nil {
					return err
				}
				if got.verdict == tcRedirect {
					sent++
				} else if got.verdict != tcDrop {
					t.Errorf("%s: verdict %d", name, int32(got.verdict))
				}
			}
			return nil
		}))
		return sent
	}
	if got := send("error-edge-hop-limit", 40); got != atOnce {
		t.Errorf("%d of 40 were answered, want %d", got, atOnce)
	}
	if got := send("no-error-about-error", 3); got != 0 {
		t.Errorf("an error was answered by an error")
	}
	if got := send("error-chain-mtu-just", 1); got != 1 {
		t.Error("who sends too long packets is not told, since others ask for other errors")
	}
	got, err := r.counted()
	r.must(err)
	if len(got.dropped) != 44 {
		t.Errorf("%d were counted as refused, want 44", len(got.dropped))
	}
	var c ErrorCount
	r.must(r.g.readErrors(&c))
	if want := (ErrorCount{TooBig: 1, TimeExceeded: atOnce, Suppressed: 40 - atOnce, Unanswerable: 3}); c != want {
		t.Errorf("counted %+v, want %+v", c, want)
	}
}

// What a node inside the domain says of a headend's own packet is believed, and
// told to senders; what it did not send, or cannot have sent, is not.
func TestHeadendLearnsFromPacketTooBig(t *testing.T) {
	r := newScapyRig(t, "r1")
	const number = 77
	r.must(r.setNumbers(number))
	run := func(f frame) (o outcome) {
		t.Helper()
		r.must(r.in(func() (err error) {
			o, err = r.runTC(f)
			return err
		}))
		return o
	}
	plain, err := packets.Load("edge-web")
	r.must(err)
	sent := run(frame{port: portEdge, b: plain.Frame})
	if sent.verdict != tcRedirect {
		t.Fatalf("the headend's verdict is %d", int32(sent.verdict))
	}
	quoted := sent.b[srv6.EthernetLen:]
	const outer = 40 + 8 + 3*16 + 24
	// As the next node sees it: the first segment is behind it.
	quoted[7]--
	quoted[43]--
	copy(quoted[24:40], quoted[48+16:48+32])
	tooBig := func(mtu uint32, about []byte) frame {
		h := srv6.Header{NextHeader: 58, HopLimit: 60, Source: xtest.Addr("fc00:1::2"), Destination: xtest.Addr("fc00:1::1"), PayloadLength: uint16(8 + len(about))}
		b, err := h.Append(nil)
		r.must(err)
		b = append(b, 2, 0, 0, 0)
		b = binary.BigEndian.AppendUint32(b, mtu)
		return frame{port: portCore, b: framed(srv6.EtherTypeIPv6, append(b, about...))}
	}
	// told is what a sender of n bytes is told to send at most; 0: they go through.
	told := func(n int) uint32 {
		t.Helper()
		f := frame{port: portEdge, b: tcpPacket(t, "fc00:8::2", n-60)}
		o := run(f)
		var xdp outcome
		r.must(r.in(func() (err error) {
			xdp, err = r.runXDP(f)
			return err
		}))
		got, err := r.counted()
		r.must(err)
		icmp := o.b[srv6.EthernetLen+srv6.IPv6Len:]
		switch {
		case o.verdict == tcRedirect && len(got.dropped) == 0 && len(o.b) == len(f.b)+outer:
			return 0
		case o.verdict == tcRedirect && slices.Equal(got.dropped, []string{reasonName(abi.ReasonPathMTU)}) && o.b[srv6.EthernetLen+6] == 58 && icmp[0] == 2:
			if xdp.verdict != xdpPass {
				t.Errorf("XDP took a packet of %d bytes: %d", n, xdp.verdict)
			}
			return binary.BigEndian.Uint32(icmp[4:])
		}
		t.Fatalf("%d bytes: verdict %d, refused for %v\n%s", n, int32(o.verdict), got.dropped, layers(o.b))
		return 0
	}
	if got := told(1460); got != 0 {
		t.Fatalf("nobody has said anything, and a sender is told %d", got)
	}

	change := func(f func(b []byte), behind ...[]byte) []byte {
		b := slices.Concat(quoted[:srv6.IPv6Len], slices.Concat(behind...), quoted[srv6.IPv6Len:])
		f(b)
		return b
	}
	const tlv = 40 + 8 + 3*16
	for what, about := range map[string][]byte{
		"not sent by it":        change(func(b []byte) { b[8+15]++ }),
		"not to a SID":          change(func(b []byte) { b[24] = 0x20 }),
		"not segment routing's": change(func(b []byte) { b[6] = 41 }),
		"no SRH":                change(func(b []byte) { b[42] = 3 }),
		"another list":          change(func(b []byte) { b[44]--; b[41] -= 2 }),
		"no proof":              change(func(b []byte) { b[tlv] = 4 }),
		"no path of it":         change(func(b []byte) { b[tlv+4]++ }),
		"another epoch":         change(func(b []byte) { b[tlv+3]++ }),
		"another scheme":        change(func(b []byte) { b[tlv+2]++ }),
		"no lane of it":         change(func(b []byte) { b[tlv+8] = 0x0f }),
		"a number to come":      change(func(b []byte) { b[tlv+15] += 100 }),
		"cut short":             quoted[:tlv+20],
	} {
		if o := run(tooBig(1400, about)); o.verdict != tcPass {
			t.Errorf("%s: verdict %d, want it left to the kernel", what, int32(o.verdict))
		}
		if got := told(1460); got != 0 {
			t.Errorf("%s: believed: a sender is told %d", what, got)
		}
	}
	if c := counterOf(t, r, 0x5eed0001); c >= number+100 {
		t.Fatalf("the counter is at %d: what was to come has come", c)
	}
	r.must(r.setNumbers(1 << 25))
	run(tooBig(1400, quoted))
	if got := told(1460); got != 0 {
		t.Errorf("a number of long ago: believed: a sender is told %d", got)
	}
	r.must(r.setNumbers(number + 1))

	if o := run(tooBig(1500, quoted)); o.verdict != tcPass {
		t.Errorf("verdict %d, want it left to the kernel", int32(o.verdict))
	}
	for n, want := range map[int]uint32{1500 - outer: 0, 1500 - outer + 1: 1500 - outer, 1480: 1500 - outer} {
		if got := told(n); got != want {
			t.Errorf("after 1500 was told, a sender of %d bytes is told %d; want %d", n, got, want)
		}
	}
	// Somebody has put options before the SRH: so much less is left.
	withOptions := func(next byte, options []byte) []byte {
		return change(func(b []byte) { b[6] = next }, options)
	}
	hopopt, destopt := []byte{43, 0, 0x1e, 4, 1, 2, 3, 4}, []byte{43, 1, 1, 12, 15: 0}
	both := slices.Concat([]byte{60}, hopopt[1:], destopt)
	for what, about := range map[string][]byte{
		"no routing header behind options": withOptions(0, []byte{59, 0, 1, 4, 0, 0, 0, 0}),
		"three headers":                    withOptions(0, slices.Concat([]byte{60}, hopopt[1:], []byte{60}, destopt[1:], destopt)),
		"264 bytes of options":             withOptions(0, append([]byte{43, 32, 1, 0}, make([]byte, 260)...)),
	} {
		run(tooBig(1410, about))
		if got := told(1500 - outer); got != 0 {
			t.Errorf("%s: believed: a sender is told %d", what, got)
		}
	}
	for i, about := range [][]byte{withOptions(0, hopopt), withOptions(60, destopt), withOptions(0, both)} {
		n := 1490 - 10*i
		run(tooBig(uint32(n), about))
		want := uint32(n - outer - []int{8, 16, 24}[i])
		if got := told(1480); got != want {
			t.Errorf("after %d was told of a packet with options, a sender is told %d; want %d", n, got, want)
		}
	}
	run(tooBig(1400, quoted))
	run(tooBig(1450, quoted)) // more than before is not believed
	if got := told(1400); got != 1280 {
		t.Errorf("after 1400 was told, a sender is told %d, want 1280", got)
	}
	run(tooBig(100, quoted)) // less than any link takes
	if got := told(1281); got != 1280 {
		t.Errorf("after 100 was told, a sender of 1281 bytes is told %d, want 1280", got)
	}
	if got := told(1280); got != 0 {
		t.Errorf("after 100 was told, a sender of 1280 bytes is told %d; it cannot send less", got)
	}
	// Ten minutes later.
	_, entry := headendEntry(r, 0x5eed0001)
	var m abi.PathMTU
	r.must(r.g.maps[tables.MapPathMTUs].Lookup(entry.Stats, &m))
	m.Expires = 1
	r.must(r.put(tables.MapPathMTUs, entry.Stats, m))
	if got := told(1460); got != 0 {
		t.Errorf("what has expired still counts: a sender is told %d", got)
	}
}

// counterOf is the last number that a path's headend gave out on CPU 0.
func counterOf(t *testing.T, r *rig, path uint32) uint64 {
	t.Helper()
	_, h := headendEntry(r, path)
	return r.mem.numbers.readNumbers(h.Counter).start
}
