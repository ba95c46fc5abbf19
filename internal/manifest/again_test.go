package manifest

import (
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// What is read by the lines that differ is what is read of all, mistakes among it, over files that change line by line in a row.
func TestLinesThatDifferAreEnough(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.yaml")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d examples, %v; want more", len(files), err)
	}
	var sources []string
	for _, file := range files {
		sources = append(sources, string(read(t, file)))
	}
	sources = append(sources, many(9))
	quick, accepted := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		src := rapid.SampledFrom(append(sources, sources[len(sources)-1], sources[len(sources)-1])).Draw(t, "file")
		_, last, _, err := ParseAfter(nil, "f.yaml", []byte(src))
		if err != nil {
			t.Fatal(err)
		}
		for range 4 {
			next := editedText(t, src)
			want, wantErr := Parse("f.yaml", []byte(next))
			got, p, again, err := ParseAfter(last, "f.yaml", []byte(next))
			if fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("got the error %v, want %v, of\n%s\nbehind\n%s", err, wantErr, next, src)
			}
			if err != nil {
				continue
			}
			accepted++
			if again {
				quick++
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("got\n%+v\nwant\n%+v, of\n%s\nbehind\n%s", got, want, next, src)
			}
			src, last = next, p
		}
	})
	t.Logf("%d of %d files that were accepted were read by what differs", quick, accepted)
	if quick < accepted/10 {
		t.Error("these are too few")
	}
}

// many is a file with so many chains of different forms.
func many(chains int) string {
	var b strings.Builder
	b.WriteString("version: 1\ndomain: {block: \"fc00::/48\"}\nnodes:\n")
	for i := range 4 {
		fmt.Fprintf(&b, "  - {name: n%d, address: \"fd00::%x\", locator: \"fc00:0:0:%x::/50\", interfaces: [{name: e, role: edge}, {name: c, role: core}]}\n", i, i+1, i<<14)
	}
	b.WriteString("functions:\n  - {name: f, node: n1, kind: forward}\n  - {name: g, node: n2, kind: forward}\nchains:\n")
	for i := range chains {
		switch i % 3 {
		case 0:
			fmt.Fprintf(&b, "  - {name: c%d, ingress: [n0], functions: [f, g], egress: n3, match: {destination: \"2001:db8:%x::/64\"}}\n", i, i)
		case 1:
			fmt.Fprintf(&b, "  # a comment with a quote \" and a bracket [\n  - name: c%d\n    ingress: [n0]\n    functions: [\n      f,\n      g]\n    egress: \"n3\"\n    match:\n      destination: 2001:db8:%x::/64\n\n", i, i)
		case 2:
			fmt.Fprintf(&b, "  -   name: 'c%d'\n      ingress:\n      - n0\n      functions: [g]\n      egress: n3\n      match: {destination: 2001:db8:%x::/64}\n", i, i)
		}
	}
	return b.String()
}

// editedText is a text with some lines changed, repeated, removed or put elsewhere.
func editedText(t *rapid.T, src string) string {
	lines := strings.Split(src, "\n")
	for range rapid.IntRange(1, 2).Draw(t, "edits") {
		at := rapid.IntRange(len(lines)/3, len(lines)-1).Draw(t, "line")
		switch rapid.IntRange(0, 8).Draw(t, "edit") {
		case 0:
			lines = slices.Insert(lines, at, lines[at])
		case 1:
			lines = slices.Delete(lines, at, min(len(lines), at+rapid.IntRange(1, 9).Draw(t, "lines")))
		case 2:
			lines[at] = strings.Replace(lines[at], "f, g", "g, f", 1)
		case 3:
			lines[at] = strings.Replace(lines[at], "[g]", "[f]", 1)
		case 4, 5:
			lines[at] = strings.Replace(lines[at], "2001:db8:", fmt.Sprintf("2001:db8:%x0", rapid.IntRange(1, 99).Draw(t, "prefix")), 1)
		case 6:
			lines[at] = strings.Replace(lines[at], rapid.SampledFrom([]string{"\"", "[", "]", "}", "'", "  ", "- ", ":"}).Draw(t, "what"), rapid.SampledFrom([]string{"\"", "[", "", "{", "|", "    "}).Draw(t, "by"), 1)
		case 7:
			lines = slices.Insert(lines, at, rapid.SampledFrom([]string{"", "# more", "  - {name: new, ingress: [n0], functions: [f], egress: n3, match: {destination: \"2001:db8:ffff::/64\"}}", "lab: {}", "    guard: off", "\"", "chains:"}).Draw(t, "added"))
		case 8:
			to := rapid.IntRange(at, len(lines)-1).Draw(t, "to")
			lines[at], lines[to] = lines[to], lines[at]
		}
		if len(lines) == 0 {
			return ""
		}
	}
	return strings.Join(lines, "\n")
}

func BenchmarkParse(b *testing.B) {
	src := []byte(many(9000))
	other := []byte(strings.Replace(string(src), "f, g", "g, f", 1))
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			if _, err := Parse("f.yaml", other); err != nil {
				b.Fatal(err)
			}
		}
	})
	_, last, _, err := ParseAfter(nil, "f.yaml", src)
	if err != nil {
		b.Fatal(err)
	}
	b.Run("one", func(b *testing.B) {
		for b.Loop() {
			if _, _, again, err := ParseAfter(last, "f.yaml", other); err != nil || !again {
				b.Fatal(again, err)
			}
		}
	})
}
