package arch

import (
	"go/ast"
	"regexp"
	"strings"
	"testing"
)

// What a packet looks like that is on a path is known in bpf/lib/encap and in
// internal/srv6; all others ask these (docs/adr/0055). So another encapsulation is
// another folder, and not a search through all programs.

const encapC = "bpf/lib/encap"

// encapsulation is what names the outer headers of SRv6 in C: a rule each.
var encapsulation = map[string]*regexp.Regexp{
	"the segment routing header":                   regexp.MustCompile(`\bstruct srh\b|\bsrh_\w+|\bROUTING_TYPE_SRH\b|\bSRH_\w+_OFF\b|\b(?:segments_left|last_entry|hdrlen)\b`),
	"the segment list":                             regexp.MustCompile(`\bsegments_equal\b|\bcsid_\w+|\bCSID_\w+|\bWS_FORM_CSID\b`),
	"a field of struct outer or struct outer_head": regexp.MustCompile(`\b(?:outer|outer_head|head|marks)(?:->|\.)(?:end|ip6|srh|list|segments|ext|vtc_flow)\b|\b(?:[a-ln-z]|\w{2,})->(?:ip6|srh)\b`),
	"an outer header as an IPv6 header":            regexp.MustCompile(`ip6_hdr \*\)\s*\(?\w+->outer\b`),
	"room for an outer header":                     regexp.MustCompile(`\bBPF_F_ADJ_ROOM_(?:EN|DE)CAP_\w+`),
	"a label stack":                                regexp.MustCompile(`\bentry_(?:label|ttl|of|written)\(|\bshape_\w+\(|\bENTRY_\w+|\bLABEL_ENTROPY\b`),
	"the flow label":                               regexp.MustCompile(`\bflow_label\(|->flowinfo\b`),
}

// mayName are the files outside of that folder where a name means something else.
var mayName = map[string][]string{
	"a field of struct outer or struct outer_head": {"bpf/lib/wire/ip6_walk.h"},                       // what it has seen
	"the segment routing header":                   {"bpf/lib/wire/ip6_walk.h"},                       // says whether there is one among others
	"the flow label":                               {"bpf/lib/wire/flow.h", "bpf/lib/out/route_tc.h"}, // what makes one of a number; the look-up of any IPv6 packet
}

func TestOneFolderOfTheProgramsKnowsTheOuterHeaders(t *testing.T) {
	tr := repository(t)
	seen := map[string]bool{}
	for _, p := range tr.c() {
		if within(p, vendored) || !strings.HasPrefix(p, "bpf/") || strings.HasPrefix(p, "bpf/include/") {
			continue
		}
		code := withoutComments(tr.read(t, p))
		for what, re := range encapsulation {
			at := re.FindStringIndex(code)
			switch {
			case at == nil:
			case within(p, []string{encapC}):
				seen[what] = true
			case !within(p, mayName[what]):
				t.Errorf("%s:%d: %q is %s, which %s alone knows; ask it by one of its functions, or give it one more", p, lineOf(code, at[0]), code[at[0]:at[1]], what, encapC)
			}
		}
	}
	for what := range encapsulation {
		// Fields are named by other names there, and a kept header is cast by a function.
		if !seen[what] && what != "an outer header as an IPv6 header" {
			t.Errorf("%s does not name %s; this test looks for other names than the sources have", encapC, what)
		}
	}
}

// makers are the packages that make, change or judge packets as they are on the wire.
var makers = []string{"internal/srv6", "internal/attack", "internal/bench", "internal/lab"}

func TestOnePackageKnowsTheOuterHeaders(t *testing.T) {
	tr := repository(t)
	fields := map[string]bool{"SRH": true, "SegmentsLeft": true, "TLVs": true}
	names := map[string]bool{}
	for _, n := range []string{"SRH", "TLV", "Encapsulate", "Shift", "SRHLen", "SegmentLen", "NextHeaderRoute", "RoutingTypeSRH", "TLVProof"} {
		names[module+"/internal/srv6."+n] = true
	}
	asks := false
	for _, f := range tr.gos {
		if f.test || f.generated || within(f.dir(), makers) || within(f.dir(), onlyTests) {
			continue
		}
		if _, ok := imports(f)[module+"/internal/srv6"]; !ok {
			continue
		}
		selectors(f, func(name string, n ast.Node) {
			asks = asks || name == module+"/internal/srv6.Outer"
			if names[name] {
				t.Errorf("%s: %s is a part of the outer headers, which internal/srv6 alone knows; ask it by a function of its outer.go, or give it one more", tr.at(n), name)
			}
		})
		ast.Inspect(f.ast, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && fields[s.Sel.Name] {
				t.Errorf("%s: .%s is a field of the outer headers, which internal/srv6 alone knows; ask it by a method of its Packet, or give it one more", tr.at(n), s.Sel.Name)
			}
			return true
		})
	}
	if !asks {
		t.Error("nobody asks internal/srv6 for an outer header; this test looks for other names than the sources have")
	}
}

// What stands behind an IPv6 header is one table; who had lists of their own
// forgot one that hid others.
func TestOneTableSaysWhatNextHeadersAre(t *testing.T) {
	tr := repository(t)
	const table = "bpf/lib/wire/net.h"
	// One checks where each may stand, the other has a length of its own for AH.
	walks := []string{"bpf/lib/encap/ext_tc.h", "bpf/lib/wire/tuple.h"}
	re := regexp.MustCompile(`\bNEXTHDR_(?:HOP|DEST|AUTH|MOBILITY|HIP|SHIM6|UNASSIGNED)\b`)
	for _, p := range tr.c() {
		if within(p, vendored) || p == table || within(p, walks) {
			continue
		}
		code := withoutComments(tr.read(t, p))
		if at := re.FindStringIndex(code); at != nil {
			t.Errorf("%s:%d: %s; ask nexthdr_is of %s, and pass over headers by bpf/lib/wire/ip6_walk.h", p, lineOf(code, at[0]), code[at[0]:at[1]], table)
		}
	}
	if !re.MatchString(tr.read(t, table)) {
		t.Errorf("%s has no table of Next Header values; this test looks for other names than the sources have", table)
	}
}
