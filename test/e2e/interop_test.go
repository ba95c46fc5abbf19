package e2e

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// A SID of k, the router between r2 and r3 in examples/compressed.yaml. The
// kernel is its endpoint.
var kernelSID = netip.MustParseAddr("fc00:0:0:400::")

func withKernelSID(m *manifest.Manifest) {
	m.Lab.Routers[0].SIDs = []netip.Addr{kernelSID}
}

// run runs a program in the namespace of a member.
func (w *world) run(at string, args ...string) string {
	w.t.Helper()
	var said []byte
	must(w.t, w.Do(at, func() (err error) {
		cmd := exec.CommandContext(soon(w.t), args[0], args[1:]...)
		if said, err = cmd.CombinedOutput(); err != nil {
			err = fmt.Errorf("in %s, %s: %w\n%s", at, strings.Join(args, " "), err, said)
		}
		return err
	}))
	return string(said)
}

// ip runs ip -6 in the namespace of a member.
func (w *world) ip(at string, args string) string {
	w.t.Helper()
	return w.run(at, append([]string{"ip", "-6"}, strings.Fields(args)...)...)
}

// sends makes the headend of a path send its packets by these SIDs. The egress keeps
// the list that it has.
func (w *world) sends(p plan.Path, sids []netip.Addr) {
	w.t.Helper()
	list := sids
	if p.Encapsulation.SIDs == model.SIDsCompressed {
		list = srv6.Compress(sids)
	}
	for _, n := range w.plan.Nodes {
		i := slices.IndexFunc(n.Headends, func(h plan.Headend) bool { return h.Path == p.Path })
		if i < 0 {
			continue
		}
		n.Headends = slices.Clone(n.Headends)
		n.Headends[i].Segments = list
		w.follow(n)
	}
}

// The kernel's own End, and its End of the NEXT-C-SID flavour, as a waypoint of our
// paths: it stamps nothing, advances our lists and shifts our containers. Packets that
// visit it pass both ways. Those whose headend leaves it out have every stamp, and are
// refused for their list.
func TestTheKernelsEndIsAWaypoint(t *testing.T) {
	t.Parallel()
	for to, chain := range forms {
		t.Run(chain, func(t *testing.T) {
			t.Parallel()
			w := build(t, strings.ReplaceAll(example(t, "compressed.yaml"), "functions: [fw, dpi, ", `functions: [fw, {sid: "fc00:0:0:400::"}, dpi, `), withKernelSID)
			p := w.path(chain, model.Forward)
			action := "End"
			if p.Encapsulation.SIDs == model.SIDsCompressed {
				action = "End flavors next-csid lblen 48 nflen 16"
			}
			w.ip("k", "route replace fc00:0:0:400::/64 encap seg6local action "+action+" count dev k-r3")
			r3 := w.capture("r3", "r3-k")
			verified := w.counting(p)
			w.reaches("h1", to)
			w.download(to, "h1", 2_000_000)
			w.download("h1", to, 2_000_000)
			if n := verified().frames(); n < 1000 {
				t.Errorf("%d frames went all the way", n)
			}
			// The kernel counts what its End did, errors apart. What comes in there
			// cannot be seen: it writes into packets that others look at.
			said := w.ip("k", "-s route show fc00:0:0:400::/64")
			var packets, bytes, failed int
			if at := strings.Index(said, "packets "); at < 0 {
				t.Errorf("no counters of the kernel's End: %s", said)
			} else if _, err := fmt.Sscanf(said[at:], "packets %d bytes %d errors %d", &packets, &bytes, &failed); err != nil || packets < 10 || failed != 0 {
				t.Errorf("the kernel's End says %q: %d packets, %d errors, %v", said, packets, failed, err)
			}
			_, srh := srv6.Encapsulate(p.Segments(), p.Encapsulation)
			behind := visitsOf(p.Segments(), p)[2]
			if r3.arrivals(p.Path, behind, srh.Segments) == 0 {
				t.Errorf("no packet came to r3 with destination %s and Segments Left %d", behind.destination, behind.left)
			}

			since := time.Now()
			w.sends(p, slices.DeleteFunc(p.SIDs(), func(a netip.Addr) bool { return a == kernelSID }))
			w.isCutOff("h1", to, probes)
			w.refused("r6", "segments", probes)
			e := w.event(since, "r6", "segments")
			said = w.sentence(e)
			// A reduced list lacks its first entry: one SID, or all of the first container.
			list := map[string]string{
				"compressed": "says r2 (fw), r3 (dpi), r2 (fw), r3 (dpi), r2 (fw)",
				"squeezed":   "names nothing before r6",
				"reduced":    "says r3 (dpi), r2 (fw), r3 (dpi), r2 (fw)",
			}[chain]
			if want := "every hop of chain " + chain + " stamped this packet in order; its segment list " + list; said != want {
				t.Errorf("explained as: %s; want: %s", said, want)
			}
		})
	}
}

// visit is what a packet's headers say as it comes to a segment.
type visit struct {
	destination netip.Addr
	left        uint8
}

// visitsOf is a packet's way by its headers.
func visitsOf(list []netip.Addr, p plan.Path) (out []visit) {
	first, srh := srv6.Encapsulate(list, p.Encapsulation)
	at := visit{first, srh.SegmentsLeft}
	for {
		out = append(out, at)
		if next, ok := srv6.Shift(at.destination); ok && p.Encapsulation.SIDs == model.SIDsCompressed {
			at.destination = next
			continue
		}
		if at.left == 0 {
			return out
		}
		at.left--
		at.destination = srh.Segments[at.left]
	}
}

// arrivals counts packets of a path that came like that.
func (c *capture) arrivals(path uint32, at visit, list []netip.Addr) (n int) {
	for _, p := range c.soFar() {
		if v, ok := p.Proof(); ok && v.Path == path && p.Header.Destination == at.destination && p.SRH.SegmentsLeft == at.left &&
			slices.Equal(p.SRH.Segments, list) {
			n++
		}
	}
	return n
}

// What the kernel's own H.Encaps and H.Encaps.Red send. Packets for a SID of ours
// have no proof, and are refused by name; what only passes a node is routed, and
// what is for a SID that the node's own kernel has in another block is the
// kernel's.
func TestForeignPoliciesOfTheKernel(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "compressed.yaml"))
	// From k, which is within the domain, to where the policies lead.
	send := func(to string) {
		t.Helper()
		_, err := lab.Ping(soon(t), w.ns("k"), netip.MustParseAddr(to), lab.PingConfig{Count: probes, Timeout: lostTime})
		must(t, err)
	}
	for i, c := range []struct{ mode, segments, reason string }{
		{"encap", "fc00:0:0:300::", "tlv-missing"},
		{"encap", "fc00:0:0:300::,fc00:0:0:600::", "tlv-missing"},
		{"encap", "fc00:0:0:300:600::", "tlv-missing"},
		{"encap", "fc00:0:0:3ff::,fc00:0:0:600::", "tlv-missing"}, // where no SID is
		{"encap.red", "fc00:0:0:300::,fc00:0:0:600::", "tlv-missing"},
		{"encap.red", "fc00:0:0:300::", "no-srh"}, // nothing is left of the list
	} {
		w.ip("k", fmt.Sprintf("route add fd98:0:0:%d::/64 encap seg6 mode %s segs %s dev k-r3", i, c.mode, c.segments))
		since := time.Now()
		send(fmt.Sprintf("fd98:0:0:%d::1", i))
		w.refused("r3", c.reason, probes)
		e := w.event(since, "r3", c.reason)
		if e.Packet == nil {
			t.Errorf("%s %s: the event has no packet", c.mode, c.segments)
		}
	}

	// fd99:3::/64 is a SID of the kernel on r3, and fd99:6::/64 is beyond r6, where
	// nobody takes it.
	w.ip("k", "route add fd99::/16 via fe80::3 dev k-r3")
	w.ip("r3", "route add fd99:3::/64 encap seg6local action End dev r3-r6")
	var toR6 host.Route
	routes, err := w.net("r3").Routes(host.ProtocolStatic)
	must(t, err)
	for _, r := range routes {
		if r.Destination == netip.MustParsePrefix("fc00:0:0:600::/56") {
			toR6 = r
		}
	}
	toR6.Destination = netip.MustParsePrefix("fd99:6::/64")
	must(t, w.net("r3").AddRoute(toR6))
	r6 := w.capture("r6", "r6-r3")
	for i, c := range []struct {
		segments string
		left     uint8
	}{
		{"fd99:3::,fd99:6::", 0}, // r3's kernel advances it
		{"fd99:6::,fd99:7::", 1}, // r3 only routes it
	} {
		w.ip("k", fmt.Sprintf("route add fd97:0:0:%d::/64 encap seg6 mode encap segs %s via fe80::3 dev k-r3", i, c.segments))
		to := netip.MustParseAddr(fmt.Sprintf("fd97:0:0:%d::1", i))
		send(to.String())
		eventually(t, func() error {
			if n := r6.foreign(to, netip.MustParseAddr("fd99:6::"), c.left); n != probes {
				return fmt.Errorf("%d of %d packets over %s came to r6", n, probes, c.segments)
			}
			return nil
		})
	}
}

// foreign counts packets without proof around one to a destination.
func (c *capture) foreign(inner, to netip.Addr, left uint8) (n int) {
	for _, p := range c.soFar() {
		if _, ok := p.Proof(); ok || p.SRH == nil || p.SRH.SegmentsLeft != left || p.Header.Destination != to {
			continue
		}
		if h, _, err := p.Inner(); err == nil && h.Destination == inner {
			n++
		}
	}
	return n
}

// frames keeps whole frames that come in by an interface.
type frames struct{ recorder[[]byte] }

func (w *world) record(node, name string) *frames {
	w.t.Helper()
	f := &frames{}
	f.start(w, node, name, 1<<16, func(frame []byte) ([]byte, bool) { return bytes.Clone(frame), true })
	return f
}

// of are the frames of a path, with what our own codec makes of them.
func (f *frames) of(path uint32) (raw [][]byte, read []decoded) {
	for _, b := range f.soFar() {
		p, err := srv6.DecodeFrame(b)
		v, ok := p.Proof()
		if err != nil || !ok || v.Path != path {
			continue
		}
		inner, _, err := p.Inner()
		if err != nil {
			continue
		}
		d := decoded{
			Source: p.Header.Source, Destination: p.Header.Destination, Flow: p.Header.FlowLabel, Length: p.Header.PayloadLength,
			HopLimit: p.Header.HopLimit, Left: p.SRH.SegmentsLeft, Last: uint8(len(p.SRH.Segments) - 1), Segments: p.SRH.Segments,
			Next: p.SRH.NextHeader, InnerSource: inner.Source, InnerDestination: inner.Destination, InnerNext: inner.NextHeader,
		}
		for _, tlv := range p.SRH.TLVs {
			d.TLVs += fmt.Sprintf("%02x%02x%x", tlv.Type, len(tlv.Value), tlv.Value)
		}
		raw, read = append(raw, b), append(read, d)
	}
	return raw, read
}

// decoded is a frame as a decoder reads it.
type decoded struct {
	Source, Destination           netip.Addr
	Flow                          uint32
	Length                        uint16
	HopLimit, Next, Left, Last    uint8
	Segments                      []netip.Addr // as on the wire
	TLVs                          string       `json:",omitempty"` // hexadecimal
	InnerSource, InnerDestination netip.Addr
	InnerNext                     uint8
}

// pcap writes frames to a file of the classic format.
func pcap(t *testing.T, frames [][]byte) string {
	t.Helper()
	b := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	b = binary.LittleEndian.AppendUint16(b, 2)
	b = binary.LittleEndian.AppendUint16(b, 4)
	for _, v := range []uint32{0, 0, 1 << 18, 1} { // zone, figures, snapshot length, Ethernet
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, f := range frames {
		for _, v := range []int{0, 0, len(f), len(f)} {
			b = binary.LittleEndian.AppendUint32(b, uint32(v))
		}
		b = append(b, f...)
	}
	name := filepath.Join(t.TempDir(), "frames.pcap")
	must(t, os.WriteFile(name, b, 0o644))
	return name
}

//go:embed testdata/decode.py
var decodeWithScapy string

// tool runs a decoder, which must be there: make deps installs it.
func tool(t *testing.T, args ...string) []byte {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v (tools/deps.sh test installs it)\n%s", args[0], err, stderr.String())
	}
	return out
}

// tsharkComplains shows the frames that are malformed, cut, or worth a warning.
func tsharkComplains(t *testing.T, file string) string {
	t.Helper()
	return string(tool(t, "tshark", "-r", file, "-Y", "_ws.malformed || _ws.short || _ws.expert.severity >= warning"))
}

// tsharkReads is what tshark makes of frames, with our dissector of the proof.
func tsharkReads(t *testing.T, file string) (out []decoded) {
	t.Helper()
	fields := []string{
		"ipv6.src", "ipv6.dst", "ipv6.flow", "ipv6.plen", "ipv6.hlim", "ipv6.routing.nxt", "ipv6.routing.segleft",
		"ipv6.routing.srh.last_entry", "ipv6.routing.srh.addr", "ipv6.nxt",
		"waystamp.type", "waystamp.length", "waystamp.scheme", "waystamp.epoch", "waystamp.path", "waystamp.rnd", "waystamp.cml",
	}
	args := []string{"tshark", "-X", "lua_script:../../tools/wireshark/waystamp.lua", "-r", file, "-T", "fields", "-E", "separator=;", "-E", "aggregator=,"}
	for _, f := range fields {
		args = append(args, "-e", f)
	}
	for line := range strings.Lines(string(tool(t, args...))) {
		v := strings.Split(strings.TrimSuffix(line, "\n"), ";")
		if len(v) != len(fields) {
			t.Fatalf("tshark says %q; want %d fields", line, len(fields))
		}
		// Of the outer header and of the inner one.
		both := func(i int) [2]string {
			l := strings.Split(v[i], ",")
			if len(l) != 2 {
				t.Fatalf("tshark says %s is %q; want one of each header", fields[i], v[i])
			}
			return [2]string(l)
		}
		var d decoded
		scan := func(s string, to any) {
			t.Helper()
			if _, err := fmt.Sscan(s, to); err != nil {
				t.Fatalf("tshark says %q: %v", s, err)
			}
		}
		source, destination, next := both(0), both(1), both(9)
		d.Source, d.InnerSource = netip.MustParseAddr(source[0]), netip.MustParseAddr(source[1])
		d.Destination, d.InnerDestination = netip.MustParseAddr(destination[0]), netip.MustParseAddr(destination[1])
		scan(both(2)[0], &d.Flow)
		scan(both(3)[0], &d.Length)
		scan(both(4)[0], &d.HopLimit)
		scan(v[5], &d.Next)
		scan(v[6], &d.Left)
		scan(v[7], &d.Last)
		for a := range strings.SplitSeq(v[8], ",") {
			d.Segments = append(d.Segments, netip.MustParseAddr(a))
		}
		scan(next[1], &d.InnerNext)
		for i, digits := range []int{2, 2, 2, 2, 8, 16, 16} { // decimal, and 0x with leading zeros
			n, err := strconv.ParseUint(v[10+i], 0, 4*digits)
			if err != nil {
				t.Fatalf("tshark says %s is %q: %v", fields[10+i], v[10+i], err)
			}
			d.TLVs += fmt.Sprintf("%0*x", digits, n)
		}
		out = append(out, d)
	}
	return out
}

// What headends and hops send is what two decoders of others read, without a
// complaint: every form of list, both proofs, on the first link and on the last.
func TestOthersDecodeWhatWeSend(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "compressed.yaml"))
	first, last := w.record("r2", "r2-r1"), w.record("r6", "r6-r3")
	for to := range forms {
		w.reaches("h1", to)
	}
	for to, chain := range forms {
		for link, f := range map[string]*frames{"the first link": first, "the last link": last} {
			t.Run(chain+" on "+link, func(t *testing.T) {
				var raw [][]byte
				var want []decoded
				eventually(t, func() error {
					if raw, want = f.of(w.path(chain, model.Forward).Path); len(raw) < 5 {
						return fmt.Errorf("%d packets to %s were recorded; want 5 or more", len(raw), to)
					}
					return nil
				})
				file := pcap(t, raw)
				if said := tsharkComplains(t, file); said != "" {
					t.Errorf("tshark complains:\n%s", said)
				}
				// It would.
				broken := bytes.Clone(raw[0])
				broken[srv6.EthernetLen+srv6.IPv6Len+1]++ // Hdr Ext Len: the inner packet starts too late
				if tsharkComplains(t, pcap(t, [][]byte{broken})) == "" {
					t.Error("tshark finds nothing wrong with a broken SRH")
				}
				equal := cmp.Comparer(func(a, b netip.Addr) bool { return a == b })
				if d := cmp.Diff(want, tsharkReads(t, file), equal); d != "" {
					t.Errorf("what we read (-), and tshark (+):\n%s", d)
				}
				var scapy []decoded
				must(t, json.Unmarshal(tool(t, "/usr/bin/python3", "-c", decodeWithScapy, file), &scapy))
				if d := cmp.Diff(want, scapy, equal); d != "" {
					t.Errorf("what we read (-), and Scapy (+):\n%s", d)
				}
			})
		}
	}
}
