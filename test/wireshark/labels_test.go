package wireshark

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/mpls"
	"github.com/waystamp/waystamp/internal/srv6"
	"github.com/waystamp/waystamp/test/packets"
)

var wordFields = []string{"mpls.label", "mpls.ttl", "waystamp.word.version", "waystamp.word.next", "waystamp.path", "waystamp.rnd", "waystamp.cml"}

// aboutLabels are the refusals that depend on nothing but what is behind the stack.
var aboutLabels = map[string]string{
	"WORD_TRUNCATED": "word-truncated", "WORD_VERSION": "word-version", "WORD_NEXT": "word-next", "PROOF_TRUNCATED": "proof-truncated",
	"TLV_MISSING": "tlv-missing", "TLV_LENGTH": "tlv-length",
}

// Of a packet that ends with its stack Wireshark asks nobody.
const nothingBehind = "mpls-word-cut-0"

// showLabels is what tshark says of wordFields, of the inner packet's source, and of refusals, a line a frame.
func showLabels(t *testing.T, cs []captured, more ...string) []string {
	t.Helper()
	args := append([]string{"-X", "lua_script:" + script, "-r", capture(t, cs), "-T", "fields", "-E", "separator=;", "-E", "aggregator=,"}, more...)
	for _, f := range append(slices.Clone(wordFields), "ip.src", "ipv6.src") {
		args = append(args, "-e", f)
	}
	for _, name := range []string{"WORD_TRUNCATED", "WORD_VERSION", "WORD_NEXT", "PROOF_TRUNCATED", "TLV_MISSING", "TLV_LENGTH"} {
		args = append(args, "-e", "waystamp."+aboutLabels[name])
	}
	lines := strings.Split(strings.TrimSuffix(tshark(t, args...), "\n"), "\n")
	if len(lines) != len(cs) {
		t.Fatalf("tshark shows %d of %d frames", len(lines), len(cs))
	}
	return lines
}

// Each packet of Scapy's with labels: stack, word, proof and inner packet as our codec reads them, and
// what every plan refuses by its name.
func TestTsharkShowsWhatIsBehindLabels(t *testing.T) {
	all, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	services := model.MPLS{Services: 100000}
	var cs []captured
	var of []packets.Packet
	for _, p := range all {
		if len(p.Frame) > srv6.EthernetLen && bytes.Equal(p.Frame[12:14], []byte{0x88, 0x47}) {
			cs, of = append(cs, captured{p.Frame, len(p.Frame)}), append(of, p)
		}
	}
	seen := map[string]int{}
	for i, line := range showLabels(t, cs) {
		p, v := of[i], strings.Split(line, ";")
		read, err := mpls.ParseFrame(p.Frame, services.IsService)
		refusal, refused := aboutLabels[p.Reason]
		got := strings.Join(v[len(wordFields)+2:], "")
		switch {
		case p.Name == nothingBehind:
		case refused:
			if marks := strings.Count(strings.Join(v[len(wordFields)+2:], " "), "1"); marks != 1 || v[len(wordFields)+2+slices.Index([]string{
				"word-truncated", "word-version", "word-next", "proof-truncated", "tlv-missing", "tlv-length"}, refusal)] == "" {
				t.Errorf("%s (%s): tshark shows %q; want %s", p.Name, p.Note, line, refusal)
			}
			seen[refusal]++
		case err != nil || read.Word == nil:
			continue
		default:
			var labels, ttls []string
			for _, e := range read.Stack {
				labels, ttls = append(labels, fmt.Sprint(e.Label())), append(ttls, fmt.Sprint(e.TTL()))
			}
			proof, ok := srv6.ReadProof(*read.Proof)
			if !ok {
				continue
			}
			want := []string{
				strings.Join(labels, ","), strings.Join(ttls, ","), "0", strconv.Itoa(int(read.Word.NextHeader)),
				fmt.Sprintf("0x%08x", proof.Path), fmt.Sprintf("0x%016x", proof.RND), fmt.Sprintf("0x%016x", proof.CML),
			}
			if d := cmp.Diff(want, v[:len(wordFields)]); d != "" || got != "" {
				t.Errorf("%s (%s): what its bytes say (-), and tshark (+):\n%s%s", p.Name, p.Note, d, got)
			}
			if p.Verdict == packets.Forward && v[len(wordFields)] == "" && v[len(wordFields)+1] == "" {
				t.Errorf("%s: no inner packet is shown", p.Name)
			}
			seen["whole"]++
		}
	}
	for _, what := range []string{"whole", "word-version", "word-next", "proof-truncated", "tlv-missing", "tlv-length"} {
		if seen[what] == 0 {
			t.Errorf("no packet showed %s", what)
		}
	}
	// Other service labels are a preference, for what is not a proof at first sight.
	i := slices.IndexFunc(of, func(p packets.Packet) bool { return p.Reason == "WORD_VERSION" })
	for services, want := range map[string]bool{"200000": false, "100000": true} {
		for n, want := range map[int]bool{0: true, i: want} {
			line := showLabels(t, cs[n:n+1], "-o", "waystamp_labels.services:"+services)[0]
			if strings.Split(line, ";")[2] != "" != want {
				t.Errorf("%s, with services from %s: %q; want a word: %t", of[n].Name, services, line, want)
			}
		}
	}
}

// Wherever a capture ends, and whatever the bytes behind the stack are, the script runs to its end.
func TestBrokenWordsDoNotStopTheDissector(t *testing.T) {
	all, err := packets.MPLS()
	if err != nil {
		t.Fatal(err)
	}
	var cs []captured
	for n := srv6.EthernetLen; n < len(all[0].Frame); n++ {
		cs = append(cs, captured{all[0].Frame, n}, captured{all[0].Frame[:n], n})
		f := bytes.Clone(all[0].Frame)
		f[n] ^= 0xff
		cs = append(cs, captured{f, len(f)})
	}
	read := tshark(t, "-X", "lua_script:"+script, "-r", capture(t, cs), "-V")
	if strings.Contains(read, "Lua Error") {
		i := strings.Index(read, "Lua Error")
		t.Errorf("of %d broken packets one stops the script: %s", len(cs), read[i:min(i+200, len(read))])
	}
	for _, what := range []string{"The capture ends within the word, the proof or the inner packet", "The inner packet cannot be read to its end", "(proof-truncated)", "(word-truncated)"} {
		if !strings.Contains(read, what) {
			t.Errorf("none of %d broken packets is shown with %q", len(cs), what)
		}
	}
}
