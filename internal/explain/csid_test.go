package explain

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Lists of containers: what is in them is named, and what a reduced one lacks is
// not missed.
func TestSentencesOfCompressedLists(t *testing.T) {
	w := world(t)
	for name, want := range map[string]string{
		"csid-list-not-compressed":   "every hop of chain squeezed stamped this packet in order; its segment list names the planned segments, but in other entries: fc00:0:0:220::, fc00:0:0:320::, fc00:0:0:221::, fc00:0:0:321::, fc00:0:0:222::, fc00:0:0:322::, fc00:0:0:620:: instead of fc00::220:320:221:321:222, fc00:0:0:322:620::",
		"csid-list-packed-otherwise": "every hop of chain squeezed stamped this packet in order; its segment list names the planned segments, but in other entries: fc00::220:320:221:0:0, fc00::321:222:322:620:0 instead of fc00::220:320:221:321:222, fc00:0:0:322:620::",
		"csid-list-swapped":          "every hop of chain squeezed stamped this packet in order; its segment list says r2 (fw), r2 (fw), r3 (dpi), r3 (dpi), r2 (fw), r3 (dpi)",
		"csid-list-shorter":          "every hop of chain squeezed stamped this packet in order; its segment list says r2 (fw), r3 (dpi), r3 (dpi), r2 (fw), r3 (dpi)",
		"csid-list-reduced":          "every hop of chain squeezed stamped this packet in order; its segment list says r3 (dpi)",
		"csid-list-whole":            "every hop of chain lean stamped this packet in order; its segment list says r2 (fw), r3 (dpi), r2 (fw), r3 (dpi), r2 (fw), r3 (dpi)",
		"slim-list-whole":            "every hop of chain slim stamped this packet in order; its segment list says r2 (fw), r3 (dpi)",
		"csid-skipped":               "r3 (dpi) never stamped this packet" + same,
		"csid-remain":                "a packet from fc00:1::1 to r6 (its proof names chain small, inside is a packet from fc00:7::2 to fc00:20::2) was refused: TEXT; its destination goes on to r3 (dpi)",
		"csid-loop":                  "a packet from fc00:1::1 to r2 (fw) (its proof names chain nearby, inside is a packet from fc00:7::2 to fc00:24::2) was refused: TEXT; its destination goes on to r2 (fw), r2 (fw), r2 (fw), r2 (fw)",
		"csid-upper-layer":           "a packet from fc00:1::1 to r2 (fw) (its proof names chain small, inside is a packet from fc00:7::2 to fc00:20::2) was refused: TEXT",
	} {
		t.Run(name, func(t *testing.T) {
			x := Explain(eventOf(t, name), w.Paths, routers)
			if diff := cmp.Diff(want, x.Sentence); diff != "" {
				t.Errorf("sentence (-want +got):\n%s", diff)
			}
		})
	}
}
