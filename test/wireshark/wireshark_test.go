package wireshark

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/packets"
)

const (
	top    = "../.." // of the repository
	script = "tools/wireshark/waystamp.lua"
	page   = "docs/how-to/wireshark.md"
)

// captured is a frame, of which a capture may have the first bytes only.
type captured struct {
	frame []byte
	bytes int
}

func whole(frames ...[]byte) (cs []captured) {
	for _, f := range frames {
		cs = append(cs, captured{f, len(f)})
	}
	return cs
}

// capture writes frames to a file of the classic pcap format.
func capture(t *testing.T, cs []captured) string {
	t.Helper()
	b := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	b = binary.LittleEndian.AppendUint16(b, 2)
	b = binary.LittleEndian.AppendUint16(b, 4)
	for _, v := range []uint32{0, 0, 1 << 18, 1} { // zone, figures, snapshot length, Ethernet
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	for _, c := range cs {
		for _, v := range []int{0, 0, c.bytes, len(c.frame)} {
			b = binary.LittleEndian.AppendUint32(b, uint32(v))
		}
		b = append(b, c.frame[:c.bytes]...)
	}
	name := filepath.Join(t.TempDir(), "capture.pcap")
	if err := os.WriteFile(name, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

// tshark runs it from the top of the repository, with nobody's settings.
func tshark(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit(2*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, "tshark", args...)
	cmd.Dir = top
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CONFIG_HOME="+home, "LC_ALL=C.UTF-8", "TZ=UTC")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark %s: %v (tools/deps.sh test installs it)\n%s", strings.Join(args, " "), err, stderr.String())
	}
	if said := stderr.String(); strings.Contains(said, "Lua") || strings.Contains(said, script) {
		t.Fatalf("tshark %s complains:\n%s", strings.Join(args, " "), said)
	}
	return string(out)
}

// refusals are what the dissector marks by the name that the programs refuse it by.
var refusals = []string{"tlv-overrun", "tlv-length", "tlv-alignment", "tlv-duplicate", "number"}

// shown is one frame as the dissector shows it, in the words of tshark's fields.
type shown struct {
	Proof    string // its first TLV, all fields of it
	Refusals string
}

var proofFields = []string{
	"type", "length", "scheme", "epoch", "path", "rnd", "rnd.zero", "rnd.lane", "rnd.frames", "rnd.counter", "cml",
}

func show(t *testing.T, cs []captured) (all []shown) {
	t.Helper()
	args := []string{"-X", "lua_script:" + script, "-r", capture(t, cs), "-T", "fields", "-E", "separator=;", "-E", "occurrence=f"}
	for _, f := range append(append([]string{}, proofFields...), refusals...) {
		args = append(args, "-e", "waystamp."+f)
	}
	for line := range strings.Lines(tshark(t, args...)) {
		v := strings.Split(strings.TrimSuffix(line, "\n"), ";")
		if len(v) != len(proofFields)+len(refusals) {
			t.Fatalf("tshark says %q; want %d fields", line, len(proofFields)+len(refusals))
		}
		var s shown
		if proof := v[:len(proofFields)]; slices.ContainsFunc(proof, func(v string) bool { return v != "" }) {
			s.Proof = strings.Join(proof, ";")
		}
		for i, r := range refusals {
			if v[len(proofFields)+i] != "" {
				s.Refusals += " " + r
			}
		}
		all = append(all, s)
	}
	if len(all) != len(cs) {
		t.Fatalf("tshark shows %d of %d frames", len(all), len(cs))
	}
	return all
}

// shownAs is what tshark must show of a proof: by the numbers that the programs have.
func shownAs(p srv6.Proof) shown {
	var s shown
	parts := ";;;"
	if p.Scheme != model.SchemeOPoT { // whose RND is masked on each link
		zero, lane := p.RND>>60, p.RND>>abi.RNDLaneShift%abi.RNDLanes
		frames, counter := p.RND>>abi.RNDFramesShift%(abi.RNDFramesMax+1)+1, p.RND&abi.RNDCounterMax
		parts = fmt.Sprintf("%d;%d;%d;%d", zero, lane, frames, counter)
		if zero != 0 || frames > abi.RNDFramesMax || counter == 0 {
			s.Refusals = " number"
		}
	}
	s.Proof = fmt.Sprintf("%d;%d;%d;%d;0x%08x;0x%016x;%s;0x%016x", abi.TLVType, abi.TLVLen, p.Scheme, p.Epoch, p.Path, p.RND, parts, p.CML)
	return s
}

// The vectors of docs/protocol, and one of each kind that is left, as literals.
func TestTsharkShowsTheVectors(t *testing.T) {
	good, err := packets.Load("web-2")
	if err != nil {
		t.Fatal(err)
	}
	p, err := srv6.DecodeFrame(good.Frame)
	if err != nil {
		t.Fatal(err)
	}
	var frames [][]byte
	var want []shown
	for tlv, s := range map[string]shown{
		"fc16020301020304" + "0001000000000001" + "2678a5db6117cdef": {Proof: "252;22;2;3;0x01020304;0x0001000000000001;0;1;1;1;0x2678a5db6117cdef"},
		"fc16030301020304" + "0001000000000001" + "a617d6073de551fd": {Proof: "252;22;3;3;0x01020304;0x0001000000000001;0;1;1;1;0xa617d6073de551fd"},
		"fc160007ffffffff" + "0ffffbffffffffff" + "0000000000000000": {Proof: "252;22;0;7;0xffffffff;0x0ffffbffffffffff;0;4095;63;4398046511103;0x0000000000000000"},
		"fc16010700000001" + "ffffffffffffffff" + "0000000000000001": {Proof: "252;22;1;7;0x00000001;0xffffffffffffffff;;;;;0x0000000000000001"},
		"fc16020700000001" + "1000000000000001" + "0000000000000001": {Proof: "252;22;2;7;0x00000001;0x1000000000000001;1;0;1;1;0x0000000000000001", Refusals: " number"},
		"fc16020700000001" + "0000fc0000000001" + "0000000000000001": {Proof: "252;22;2;7;0x00000001;0x0000fc0000000001;0;0;64;1;0x0000000000000001", Refusals: " number"},
		"fc16020700000001" + "0001040000000000" + "0000000000000001": {Proof: "252;22;2;7;0x00000001;0x0001040000000000;0;1;2;0;0x0000000000000001", Refusals: " number"},
	} {
		value, err := hex.DecodeString(tlv[4:])
		if err != nil {
			t.Fatal(err)
		}
		frame, err := p.WithSRH(func(s *srv6.SRH) { s.TLVs = []srv6.TLV{{Type: 0xfc, Value: value}} }).Append(nil)
		if err != nil {
			t.Fatal(err)
		}
		frames, want = append(frames, frame), append(want, s)
	}
	if d := cmp.Diff(want, show(t, whole(frames...))); d != "" {
		t.Errorf("the vectors (-), and tshark (+):\n%s", d)
	}
}

// aboutTLVs are the refusals that depend on nothing but the TLVs.
var aboutTLVs = map[string]string{
	"TLV_OVERRUN": " tlv-overrun", "TLV_LENGTH": " tlv-length", "TLV_ALIGNMENT": " tlv-alignment", "TLV_DUPLICATE": " tlv-duplicate",
}

// Wireshark wants hop-by-hop options to be options, and shows nothing behind these.
const notForWireshark = "options-broken-hop-by-hop"

func TestTsharkShowsEveryProofOfTheTestPackets(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	var frames [][]byte
	for _, p := range all {
		frames = append(frames, p.Frame)
	}
	seen := map[string]int{}
	for i, got := range show(t, whole(frames...)) {
		p := all[i]
		read, err := srv6.DecodeFrame(p.Frame)
		v, ok := read.Proof()
		var want shown
		refusal, refused := aboutTLVs[p.Reason]
		switch {
		case refused:
			want = shown{got.Proof, refusal}
			seen[p.Reason]++
		case p.Name == notForWireshark:
		case err == nil && ok:
			want = shownAs(v)
			seen[v.Scheme.String()]++
			seen[want.Refusals]++
		case err == nil && read.SRH != nil:
			seen["no proof"]++
		default:
			continue // no SRH, one in front of another, or a broken one
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (%s): what its bytes say (-), and tshark (+):\n%s", p.Name, p.Note, d)
		}
	}
	for _, what := range []string{"pot", "opot", "keyed", "keyed-flow", " number", "no proof", "TLV_OVERRUN", "TLV_LENGTH", "TLV_ALIGNMENT", "TLV_DUPLICATE"} {
		if seen[what] == 0 {
			t.Errorf("no packet showed%s", what)
		}
	}
}

// Whatever the bytes are, and wherever a capture ends, the script runs to its end: an
// error in it would be among what tshark shows.
func TestBrokenHeadersDoNotStopTheDissector(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TEST_SEED=%d repeats this", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	var cs []captured
	for _, p := range all {
		read, err := srv6.DecodeFrame(p.Frame)
		if err != nil || read.SRH == nil {
			continue
		}
		headers := len(p.Frame) - len(read.Payload)
		cs = append(cs, captured{p.Frame, srv6.EthernetLen + random.IntN(headers-srv6.EthernetLen)})
		for range 8 {
			f := bytes.Clone(p.Frame)
			for range 1 + random.IntN(3) {
				f[srv6.EthernetLen+srv6.IPv6Len+random.IntN(headers-srv6.EthernetLen-srv6.IPv6Len)] = byte(random.Uint32())
			}
			cs = append(cs, captured{f, len(f)}, captured{f, srv6.EthernetLen + random.IntN(headers-srv6.EthernetLen)})
		}
	}
	// Each end that one packet's headers can have.
	for n := range len(all[0].Frame) {
		cs = append(cs, captured{all[0].Frame, n + 1})
	}
	file := capture(t, cs)
	read := tshark(t, "-X", "lua_script:"+script, "-r", file, "-V")
	for line := range strings.Lines(read) {
		if strings.Contains(line, "Lua Error") {
			t.Fatalf("of %d broken packets one stops the script: %s", len(cs), line)
		}
	}
	for _, what := range []string{"The capture ends within the TLV", "(tlv-overrun)", "(tlv-length)", "Scheme is not known"} {
		if !strings.Contains(read, what) {
			t.Errorf("none of %d broken packets is shown with %q", len(cs), what)
		}
	}
}

// The page's commands, and what it says they print, on a packet of test/packets.
func TestTheHowToShowsWhatTsharkPrints(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(top, page))
	if err != nil {
		t.Fatal(err)
	}
	p, err := packets.Load("flow-tcp-2")
	if err != nil {
		t.Fatal(err)
	}
	file := capture(t, whole(p.Frame))
	n := 0
	for _, block := range regexp.MustCompile("(?ms)^```\n\\$ tshark (.*?)\n(.*?)^```").FindAllStringSubmatch(string(text), -1) {
		n++
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "tshark "+strings.ReplaceAll(block[1], "capture.pcap", file)+" 2>/dev/null")
		cmd.Dir = top
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("tshark %s: %v", block[1], err)
		}
		if d := cmp.Diff(block[2], string(out)); d != "" {
			t.Errorf("tshark %s: the page (-), and tshark (+):\n%s", block[1], d)
		}
	}
	if n < 2 {
		t.Errorf("%s shows %d commands of tshark; want 2 or more", page, n)
	}
}
