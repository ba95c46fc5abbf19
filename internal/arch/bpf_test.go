package arch

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
)

var (
	reComment    = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	reReasonUse  = regexp.MustCompile(`\bREASON\(\s*([A-Z0-9_]+)\s*\)`)
	reReasonLine = regexp.MustCompile(`(?m)^\s*X\((\w+),\s*("(?:[^"\\]|\\.)*")(?:,\s*([\w\s|]+))?\)`)
	rePlaceLine  = regexp.MustCompile(`(?m)^\s*X\(\w+,\s*"([^"]*)",\s*"([^"]+)"\)`)

	reReasonNumber  = regexp.MustCompile(`\bWS_REASON_([A-Z0-9_]+)\b`)
	reReasonWrapper = regexp.MustCompile(`\{\s*return -?(?:\(int\))?REASON\(\w+\);\s*\}`)
	reEnum          = regexp.MustCompile(`(?s)\benum (ws_\w+) \{(.*?)\};`)
	reDefine        = regexp.MustCompile(`(?m)^#define (WS_[A-Z0-9_]+)[ \t]+(.+)$`)
)

const (
	abiHeader     = "bpf/include/waystamp/abi.h"
	reasonsHeader = "bpf/include/waystamp/reasons.h"
	placesHeader  = "bpf/include/waystamp/places.h"
	reasonMacro   = "bpf/lib/reason.h"
)

// vendored C files carry the licence of where they come from; the README beside
// them says which.
var vendored = []string{"bpf/include/linux/bpf.h", "bpf/include/linux/bpf_common.h", "bpf/include/bpf"}

func (tr *tree) c() []string {
	var ps []string
	for _, p := range tr.files {
		if e := path.Ext(p); e == ".c" || e == ".h" {
			ps = append(ps, p)
		}
	}
	return ps
}

func TestEveryCFileStartsWithItsLicence(t *testing.T) {
	tr := repository(t)
	for _, p := range tr.c() {
		first, _, _ := strings.Cut(tr.read(t, p), "\n")
		want := "/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */"
		switch {
		case !strings.HasPrefix(p, "bpf/"):
			t.Errorf("%s: C lives in bpf/; move it there", p)
		case within(p, vendored):
			if p != "bpf/include/bpf/bpf_helper_defs.h" && !strings.HasPrefix(first, "/* SPDX-License-Identifier: ") {
				t.Errorf("%s: the first line names no licence; vendor the file unchanged", p)
			}
		case first != want:
			t.Errorf("%s: the first line is %q; make it %q", p, first, want)
		}
	}
}

// Comments of C, blanked out; their length stays, so that offsets do.
func withoutComments(s string) string {
	return reComment.ReplaceAllStringFunc(s, func(c string) string {
		return strings.Map(func(r rune) rune {
			if r == '\n' {
				return r
			}
			return ' '
		}, c)
	})
}

// decided are the places that decide that a packet is refused, by reason: uses of
// REASON(NAME).
func decided(t *testing.T, tr *tree) map[string][]string {
	t.Helper()
	at := map[string][]string{}
	for _, p := range tr.c() {
		if within(p, vendored) || p == reasonMacro {
			continue
		}
		code := withoutComments(tr.read(t, p))
		for _, m := range reReasonUse.FindAllStringSubmatchIndex(code, -1) {
			name := code[m[2]:m[3]]
			at[name] = append(at[name], fmt.Sprintf("%s:%d", p, lineOf(code, m[0])))
		}
	}
	return at
}

func TestEveryReasonIsDecidedWhereItSays(t *testing.T) {
	tr := repository(t)
	uses := decided(t, tr)
	rows := map[string]bool{}
	for _, row := range reReasonLine.FindAllStringSubmatch(tr.read(t, reasonsHeader), -1) {
		name, several := row[1], strings.Contains(row[3], "SEVERAL")
		rows[name] = true
		switch at := uses[name]; {
		case name == "NONE":
		case len(at) == 0:
			t.Errorf("%s is in %s, but nothing refuses a packet for it; take it out as long as no release has it", name, reasonsHeader)
		case several && len(at) == 1:
			t.Errorf("%s is decided at %s alone; take SEVERAL out of %s", name, at[0], reasonsHeader)
		case !several && len(at) > 1:
			t.Errorf("%s is decided in %d places: %s; give each cause a reason of its own, or say SEVERAL in %s",
				name, len(at), strings.Join(at, ", "), reasonsHeader)
		}
	}
	for name, at := range uses {
		if !rows[name] {
			t.Errorf("%s: there is no reason %s in %s", at[0], name, reasonsHeader)
		}
	}
}

// A reason's number alone has no place, and a function that does nothing but name
// a reason would be the place of all that call it.
func TestReasonsAreDecidedAtTheirPlace(t *testing.T) {
	tr := repository(t)
	for _, p := range tr.c() {
		if within(p, vendored) || p == reasonsHeader || p == reasonMacro {
			continue
		}
		code := withoutComments(tr.read(t, p))
		for _, m := range reReasonNumber.FindAllStringSubmatchIndex(code, -1) {
			before := strings.TrimRight(code[:m[0]], " \t\n")
			name := code[m[2]:m[3]]
			if name != "NONE" && name != "COUNT" && !strings.HasSuffix(before, "case") && !strings.HasSuffix(before, "==") {
				t.Errorf("%s:%d: WS_REASON_%s is for comparisons; write REASON(%s)", p, lineOf(code, m[0]), name, name)
			}
		}
		for _, m := range reReasonWrapper.FindAllStringIndex(code, -1) {
			t.Errorf("%s:%d: a function that only names a reason hides the place; write REASON where the packet is found wrong", p, lineOf(code, m[0]))
		}
	}
}

// A packet is dropped by ws_refuse alone, so that it is counted. What comes behind
// a refusal, and may send an ICMP error for it, returns CTX_REFUSED: in a function
// that has called ws_refuse before, or in the file of ICMP errors, whose functions
// are called behind ws_refuse.
func TestNoPacketIsDroppedWithoutAReason(t *testing.T) {
	tr := repository(t)
	const errors = "bpf/lib/out/icmp_tc.h"
	bare := regexp.MustCompile(`\b(?:CTX_DROP|TC_ACT_SHOT|XDP_DROP|XDP_ABORTED)\b`)
	behind := regexp.MustCompile(`\bCTX_REFUSED\b|\b(?:icmp_(?:too_big|time_exceeded|no_way|no_tunnel)|ws_icmp[46])\(`)
	body := regexp.MustCompile(`(?ms)^\{\n.*?^\}`)
	refused := 0
	for _, p := range tr.c() {
		if within(p, vendored) || !strings.HasPrefix(p, "bpf/") || strings.HasPrefix(p, "bpf/include/") {
			continue
		}
		code := withoutComments(tr.read(t, p))
		for _, m := range bare.FindAllStringIndex(code, -1) {
			if p != "bpf/lib/hook.h" && p != "bpf/lib/node/refuse.h" {
				t.Errorf("%s:%d: %s drops a packet that nobody counts; return ws_refuse(..., REASON(...), ...)", p, lineOf(code, m[0]), code[m[0]:m[1]])
			}
		}
		if p == errors || p == "bpf/lib/node/refuse.h" {
			continue
		}
		for _, f := range body.FindAllStringIndex(code, -1) {
			text := code[f[0]:f[1]]
			refuse := strings.Index(text, "ws_refuse(")
			for _, m := range behind.FindAllStringIndex(text, -1) {
				refused++
				if refuse < 0 || refuse > m[0] {
					t.Errorf("%s:%d: %s without ws_refuse before it in this function; refuse the packet first", p, lineOf(code, f[0]+m[0]), text[m[0]:m[1]])
				}
			}
		}
	}
	if refused == 0 {
		t.Errorf("nothing calls what is in %s; this test looks for other names than the sources have", errors)
	}
}

func TestEveryFileThatRefusesIsInTheListOfPlaces(t *testing.T) {
	tr := repository(t)
	listed := map[string]bool{}
	for i, row := range rePlaceLine.FindAllStringSubmatch(tr.read(t, placesHeader), -1) {
		name := row[1] + row[2]
		listed[name] = true
		if got := abi.File(i + 1).String(); got != name {
			t.Errorf("file %d is %s in %s, and %s in internal/abi; run make generate", i+1, name, placesHeader, got)
		}
	}
	used, bases := map[string]bool{}, map[string]string{}
	for _, p := range tr.c() {
		name := strings.TrimPrefix(strings.TrimPrefix(p, "bpf/"), "lib/")
		if within(p, vendored) || p == reasonMacro {
			continue
		}
		if other, ok := bases[path.Base(p)]; ok && listed[name] {
			t.Errorf("%s and %s have one name, by which the compiler tells places apart; rename one", p, other)
		}
		bases[path.Base(p)] = p
		if used[name] = reReasonUse.MatchString(withoutComments(tr.read(t, p))); used[name] && !listed[name] {
			t.Errorf("%s refuses packets; add it at the end of %s", p, placesHeader)
		}
	}
	for name := range listed {
		if !used[name] {
			t.Errorf("%s lists %s, which refuses nothing; take it out as long as no release has it", placesHeader, name)
		}
	}
}

func cName(r abi.Reason) string {
	return "WS_REASON_" + strings.ToUpper(strings.ReplaceAll(r.String(), "-", "_"))
}

// unreachable are the reasons that no packet and no plan can bring about, and
// why: the verifier wants a bound there, or the kernel would have to fail.
var unreachable = map[abi.Reason]string{}

// Only what runs the programs counts: a name in another test proves nothing.
func TestEveryReasonIsBroughtAboutByATest(t *testing.T) {
	tr := repository(t)
	var packets, tests strings.Builder
	for _, p := range tr.files {
		switch {
		case within(p, []string{"test/packets"}) && path.Ext(p) == ".txt":
			packets.WriteString(tr.read(t, p))
		case within(p, []string{"internal/dataplane", "internal/agent", "internal/lab", "test/e2e"}) && strings.HasSuffix(p, "_test.go"):
			tests.WriteString(tr.read(t, p))
		}
	}
	if !strings.Contains(tests.String(), `"`+module+`/test/packets"`) {
		t.Error("no test of the programs reads test/packets; its packets prove nothing until one does")
	}
	names := reasonGoNames(tr)
	for _, r := range abi.Reasons() {
		name := regexp.QuoteMeta(strings.TrimPrefix(cName(r), "WS_REASON_"))
		found := regexp.MustCompile(`(?m)^(expect: drop|report:)( [A-Z_]+)* `+name+`\b`).MatchString(packets.String()) ||
			regexp.MustCompile(`\babi\.`+names[r]+`\b|"`+r.String()+`"`).MatchString(tests.String())
		why, excused := unreachable[r]
		switch {
		case found && excused:
			t.Errorf("reason %s has a test, yet internal/arch excuses it (%s); take the excuse out", r, why)
		case !found && !excused:
			t.Errorf("no test of the programs brings about %s (abi.%s); add a packet to test/packets/make_packets.py or a test to internal/dataplane, or say in this test's list why neither can be",
				r, names[r])
		}
	}
}

// abiConstants are the constants of internal/abi, from its source.
func abiConstants(tr *tree) map[string]uint64 {
	m := map[string]uint64{}
	for _, f := range tr.gos {
		if f.dir() != "internal/abi" || f.test {
			continue
		}
		for _, d := range f.ast.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				v := s.(*ast.ValueSpec)
				if lit, ok := v.Values[0].(*ast.BasicLit); ok {
					n, _ := constant.Uint64Val(constant.MakeFromLiteral(lit.Value, lit.Kind, 0))
					m[v.Names[0].Name] = n
				}
			}
		}
	}
	return m
}

func reasonGoNames(tr *tree) map[abi.Reason]string {
	m := map[abi.Reason]string{}
	for name, v := range abiConstants(tr) {
		if strings.HasPrefix(name, "Reason") && name != "ReasonCount" {
			m[abi.Reason(v)] = name
		}
	}
	return m
}

// The headers read once more, by a second and simpler reader than tools/abigen
// has, that needs no clang: so make test notices a stale internal/abi.
func TestTheGoSideOfTheContractIsTheHeaders(t *testing.T) {
	tr := repository(t)
	const remedy = "run make generate"

	rows := reReasonLine.FindAllStringSubmatch(tr.read(t, reasonsHeader), -1)
	if len(rows) != abi.ReasonCount {
		t.Errorf("%s has %d reasons, internal/abi %d; %s", reasonsHeader, len(rows), abi.ReasonCount, remedy)
	}
	for i, row := range rows {
		text, err := strconv.Unquote(row[2])
		if err != nil {
			t.Fatalf("%s: text of %s: %v", reasonsHeader, row[1], err)
		}
		r := abi.Reason(i)
		if got, want := cName(r), "WS_REASON_"+row[1]; got != want || r.Text() != text {
			t.Errorf("reason %d is %s (%q) in %s, and %s (%q) in internal/abi; %s", i, want, text, reasonsHeader, got, r.Text(), remedy)
		}
	}

	header := withoutComments(tr.read(t, abiHeader))
	flat := func(name string) string { return strings.ToUpper(strings.ReplaceAll(name, "_", "")) }
	goSide := map[string]uint64{}
	for name, v := range abiConstants(tr) {
		goSide[flat(name)] = v
	}
	defines := map[string]string{}
	for _, m := range reDefine.FindAllStringSubmatch(header, -1) {
		defines[m[1]] = m[2]
	}
	for name, expr := range defines {
		want, err := evaluate(expr, defines)
		if err != nil {
			t.Errorf("%s: %s: %v", abiHeader, name, err)
		} else if got, ok := goSide[flat(strings.TrimPrefix(name, "WS_"))]; !ok || got != want {
			t.Errorf("%s: %s is %d, in internal/abi %d; %s", abiHeader, name, want, got, remedy)
		}
	}

	goTypes := map[string]func(int) string{
		"ws_scheme":       func(i int) string { return "WS_SCHEME_" + abi.Scheme(i).String() },
		"ws_behaviour":    func(i int) string { return "WS_BEHAVIOUR_" + abi.Behaviour(i).String() },
		"ws_on_violation": func(i int) string { return "WS_ON_VIOLATION_" + abi.OnViolation(i).String() },
		"ws_form":         func(i int) string { return "WS_FORM_" + abi.Form(i).String() },
		"ws_guard":        func(i int) string { return "WS_GUARD_" + abi.Guard(i).String() },
		"ws_hook":         func(i int) string { return "WS_HOOK_" + abi.Hook(i).String() },
		"ws_recognise":    func(i int) string { return "WS_RECOGNISE_" + abi.Recognise(i).String() },
		"ws_on_unknown":   func(i int) string { return "WS_ON_UNKNOWN_" + abi.OnUnknown(i).String() },
		"ws_match_action": func(i int) string { return "WS_MATCH_" + abi.MatchAction(i).String() },
		"ws_match_use":    func(i int) string { return "WS_MATCH_" + abi.MatchUse(i).String() },
		"ws_rule_use":     func(i int) string { return "WS_RULE_" + abi.RuleUse(i).String() },
		"ws_rules_state":  func(i int) string { return "WS_RULES_" + abi.RulesState(i).String() },
		"ws_bytes":        func(i int) string { return "WS_BYTES_" + abi.Bytes(i).String() },
		"ws_by":           func(i int) string { return "WS_BY_" + abi.By(i).String() },
	}
	enums := reEnum.FindAllStringSubmatch(header, -1)
	if len(enums) != len(goTypes) {
		t.Errorf("%s has %d enums, this test knows %d; add it here and %s", abiHeader, len(enums), len(goTypes), remedy)
	}
	for _, e := range enums {
		of, ok := goTypes[e[1]]
		if !ok {
			t.Errorf("%s: this test does not know enum %s; add it", abiHeader, e[1])
			continue
		}
		n := 0
		for line := range strings.SplitSeq(e[2], ",") {
			name, value, ok := strings.Cut(strings.TrimSpace(line), " = ")
			if !ok {
				continue
			}
			i, err := strconv.Atoi(value)
			if err != nil {
				t.Fatalf("%s: %s: %v", abiHeader, name, err)
			}
			if got := strings.ToUpper(strings.ReplaceAll(of(i), "-", "_")); got != name {
				t.Errorf("%s: %s is %d, which internal/abi calls %s; %s", abiHeader, name, i, got, remedy)
			}
			n++
		}
		if last := of(n); !strings.Contains(last, "(") {
			t.Errorf("internal/abi has %s in enum %s, %s does not; %s", last, e[1], abiHeader, remedy)
		}
	}
}

// evaluate computes a C expression of whole numbers with Go's own rules for
// constants, which give the same for shifts, sums and products.
func evaluate(expr string, defines map[string]string) (uint64, error) {
	for strings.Contains(expr, "WS_") {
		next := regexp.MustCompile(`\bWS_\w+`).ReplaceAllStringFunc(expr, func(n string) string { return "(" + defines[n] + ")" })
		if next == expr || len(next) > 1000 {
			return 0, fmt.Errorf("cannot resolve %q", expr)
		}
		expr = next
	}
	expr = regexp.MustCompile(`\b(\d+)U?L{0,2}\b`).ReplaceAllString(expr, "$1")
	v, err := types.Eval(token.NewFileSet(), nil, token.NoPos, expr)
	if err != nil {
		return 0, err
	}
	n, ok := constant.Uint64Val(constant.ToInt(v.Value))
	if !ok {
		return 0, fmt.Errorf("%q is not a whole number", expr)
	}
	return n, nil
}

// What a chain's file says and what is on the wire are the same numbers.
func TestTheModelAndTheContractAgree(t *testing.T) {
	for i := range 256 {
		m, a := model.Scheme(i).String(), abi.Scheme(i).String()
		if m != a {
			t.Errorf("scheme %d is %s in internal/model and %s in internal/abi", i, m, a)
		}
		m, a = model.OnViolation(i).String(), abi.OnViolation(i).String()
		if m != a {
			t.Errorf("on-violation %d is %s in internal/model and %s in internal/abi", i, m, a)
		}
		m, a = model.Guard(i).String(), abi.Guard(i).String()
		if m != a {
			t.Errorf("guard %d is %s in internal/model and %s in internal/abi", i, m, a)
		}
	}
	if model.SegmentsMax != abi.SegsMax {
		t.Errorf("internal/model allows %d segments, the programs %d", model.SegmentsMax, abi.SegsMax)
	}
	if model.OrderedMax != abi.RulesMax {
		t.Errorf("internal/model allows %d rules with a priority, the programs %d", model.OrderedMax, abi.RulesMax)
	}
}

func TestTheCommittedObjectsKnowEveryReason(t *testing.T) {
	tr := repository(t)
	n := 0
	for _, p := range tr.files {
		if path.Dir(p) != "internal/dataplane/object" || path.Ext(p) != ".o" {
			continue
		}
		if strings.HasPrefix(path.Base(p), "streamlookup_") {
			continue // it is of a worker's namespace, and refuses nothing
		}
		n++
		spec, err := ebpf.LoadCollectionSpec(filepath.Join(tr.top, p))
		if err != nil {
			t.Errorf("%s: %v; run make generate", p, err)
			continue
		}
		if m := spec.Maps["ws_refusals"]; m == nil || m.MaxEntries != abi.ReasonCount {
			t.Errorf("%s: ws_refusals is %v; want one of %d entries; run make generate", p, m, abi.ReasonCount)
		}
	}
	if n == 0 {
		t.Error("no object in internal/dataplane/object; run make generate")
	}
}

// A header that takes a struct __sk_buff ends in _tc or is in skb/; one that ends in
// _xdp is for XDP alone; all others are for both hooks, and take what hook.h names.
// So the halves of a behaviour stand beside each other, and a program of one hook
// includes nothing of the other.
func TestSuffixesOfHeadersNameTheirHook(t *testing.T) {
	tr := repository(t)
	reInclude := regexp.MustCompile(`(?m)^#include "(lib/[^"]+)"`)
	includes := map[string][]string{}
	for _, p := range tr.c() {
		if within(p, vendored) || strings.HasPrefix(p, "bpf/include/") {
			continue
		}
		text := tr.read(t, p)
		for _, m := range reInclude.FindAllStringSubmatch(text, -1) {
			includes[p] = append(includes[p], "bpf/"+m[1])
		}
		// Those with an #ifdef.
		if path.Ext(p) != ".h" || p == "bpf/lib/hook.h" || strings.HasPrefix(p, "bpf/lib/encap/outer") {
			continue
		}
		code := withoutComments(text)
		takes, forTC := strings.Contains(code, "struct __sk_buff"), strings.HasSuffix(p, "_tc.h") || path.Dir(p) == "bpf/lib/skb"
		switch {
		case takes && !forTC:
			t.Errorf("%s takes a struct __sk_buff; let its name end in _tc.h, or take a ctx_t", p)
		case !takes && forTC:
			t.Errorf("%s takes no struct __sk_buff; take _tc from its name", p)
		case strings.Contains(code, "struct xdp_md") && !strings.HasSuffix(p, "_xdp.h"):
			t.Errorf("%s takes a struct xdp_md; let its name end in _xdp.h, or take a ctx_t", p)
		}
	}
	programs := 0
	for _, p := range tr.c() {
		if !strings.HasSuffix(p, ".bpf.c") {
			continue
		}
		programs++
		xdp := strings.HasSuffix(p, "_xdp.bpf.c")
		seen := map[string]bool{}
		for next := []string{p}; len(next) > 0; next = next[1:] {
			for _, h := range includes[next[0]] {
				if seen[h] {
					continue
				}
				seen[h] = true
				next = append(next, h)
				if xdp && (strings.HasSuffix(h, "_tc.h") || path.Dir(h) == "bpf/lib/skb") || !xdp && strings.HasSuffix(h, "_xdp.h") {
					t.Errorf("%s, included by %s, is for the other hook than %s", h, next[0], p)
				}
			}
		}
	}
	if programs == 0 {
		t.Error("there is no program *.bpf.c; this test looks for other names than the sources have")
	}
}

// A comment that names a header of the data path helps as long as the header is
// there.
func TestNamedHeadersOfTheDataPathExist(t *testing.T) {
	tr := repository(t)
	exists := map[string]bool{}
	for _, p := range tr.c() {
		exists[p] = true
	}
	reHeader := regexp.MustCompile(`\b(?:bpf/)?lib/[a-z0-9_/]+\.h\b`)
	for p, text := range tr.text(t) {
		for _, at := range reHeader.FindAllStringIndex(text, -1) {
			name := text[at[0]:at[1]]
			if !strings.HasPrefix(name, "bpf/") {
				name = "bpf/" + name
			}
			if !exists[name] {
				t.Errorf("%s:%d: there is no %s; name the header that has it now", p, lineOf(text, at[0]), name)
			}
		}
	}
}

func TestNothingPrintsFromTheKernel(t *testing.T) {
	tr := repository(t)
	for _, p := range tr.c() {
		if within(p, vendored) {
			continue
		}
		code := withoutComments(tr.read(t, p))
		for _, m := range regexp.MustCompile(`\b(bpf_printk|bpf_trace_printk)\b`).FindAllStringIndex(code, -1) {
			t.Errorf("%s:%d: %s; refuse with a reason instead, its event tells user space", p, lineOf(code, m[0]), code[m[0]:m[1]])
		}
	}
}
