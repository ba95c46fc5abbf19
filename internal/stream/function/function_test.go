package function

import (
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var testKeys = Keys{7: {1, 2, 3}, 8: {4}}

// made makes one function from its JSON.
func made(t testing.TB, text string, side Side) (Function, *atomic.Uint64) {
	t.Helper()
	list, err := ParseList("run", []json.RawMessage{json.RawMessage(text)})
	if err != nil {
		t.Fatal(err)
	}
	event := new(atomic.Uint64)
	f, err := list[0].Make(Surroundings{Side: side, Keys: testKeys, Event: event, Random: rand.Reader})
	if err != nil {
		t.Fatal(err)
	}
	return f, event
}

// input is what a handler gets: pieces, some with a pause behind them, and the end.
type input struct {
	pieces [][]byte
	pauses []bool
	room   []int // for output, in turn
}

func whole(p []byte) input {
	return input{pieces: [][]byte{p}, pauses: []bool{false}, room: []int{64 << 10}}
}

// drawInput cuts bytes into pieces.
func drawInput(t *rapid.T, p []byte) input {
	var in input
	for len(p) > 0 {
		n := min(len(p), rapid.SampledFrom([]int{1, 2, 3, 17, 100, 4096, 16 << 10, 1 << 20}).Draw(t, "piece"))
		in.pieces = append(in.pieces, p[:n])
		in.pauses = append(in.pauses, rapid.IntRange(0, 3).Draw(t, "pause") == 0)
		p = p[n:]
	}
	in.room = rapid.SliceOfN(rapid.SampledFrom([]int{64, 100, 4096, 64 << 10}), 1, 4).Draw(t, "room")
	return in
}

type fataler interface {
	Helper()
	Fatalf(string, ...any)
}

// through runs input through a handler, to its end, and holds the handler to its contract.
// It returns the verdict too, which is Continue at the end.
func through(t fataler, h Handler, in input) (got []byte, v Verdict) {
	t.Helper()
	turn := 0
	call := func(p []byte, at Moment) Verdict {
		for calls := 0; ; calls++ {
			room := in.room[turn%len(in.room)]
			turn++
			n, out, v := h.Transform.Transform(p, at, make([]byte, 0, room))
			if n > len(p) || len(out) > room {
				t.Fatalf("the handler took %d of %d bytes, and made %d in room for %d", n, len(p), len(out), room)
			}
			got = append(got, out...)
			p = p[n:]
			switch {
			case v == Continue && len(p) > 0:
				t.Fatalf("the handler says that it is through, and has left %d bytes", len(p))
			case v != Full:
				return v
			case n == 0 && len(out) == 0:
				t.Fatalf("the handler neither takes nor makes a byte in room for %d", room)
			}
		}
	}
	defer h.Transform.Close()
	for i, p := range in.pieces {
		if v := call(p, More); v != Continue {
			return got, v
		}
		if in.pauses[i] {
			if v := call(nil, Pause); v != Continue {
				return got, v
			}
		}
	}
	return got, call(nil, End)
}

// text is bytes that compress more or less well.
func text(t *rapid.T) []byte {
	var b []byte
	for range rapid.IntRange(0, 6).Draw(t, "parts") {
		n := rapid.SampledFrom([]int{1, 10, 1000, 40_000, 100_000}).Draw(t, "bytes")
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			b = append(b, bytes.Repeat([]byte{'a'}, n)...)
		case 1:
			seed := rapid.Uint32().Draw(t, "seed")
			for range n {
				seed = seed*1664525 + 1013904223
				b = append(b, byte(seed>>24))
			}
		case 2:
			for i := range n {
				b = append(b, "the quick brown fox "[(i*i/7)%20])
			}
		}
	}
	return b
}

// What a function does, its inverse undoes: whatever the pieces are that bytes come in,
// and however little room there is.
func TestInversesGiveBackTheBytes(t *testing.T) {
	for _, one := range []string{`"gzip"`, `{"gzip": {"level": 9}}`, `{"seal": {"key": 7}}`, `"xor"`, `{"xor": {"passes": 5, "key": 255}}`, `{"xor": {"passes": 0}}`} {
		t.Run(one, func(t *testing.T) {
			list, err := ParseList("run", []json.RawMessage{json.RawMessage(one)})
			if err != nil {
				t.Fatal(err)
			}
			surroundings := Surroundings{Keys: testKeys, Random: rand.Reader}
			there, err := list[0].Make(surroundings)
			if err != nil {
				t.Fatal(err)
			}
			back, err := Reverse(list)[0].Make(surroundings)
			if err != nil {
				t.Fatal(err)
			}
			rapid.Check(t, func(rt *rapid.T) {
				want := text(rt)
				middle, v := through(rt, there.Open(Connection{}), drawInput(rt, want))
				if v != Continue {
					rt.Fatalf("%s says %d", one, v)
				}
				if len(want) > 0 && bytes.Equal(middle, want) != strings.Contains(one, `"passes": 0`) {
					rt.Fatalf("%s changes %d bytes into %d; only no passes change nothing", one, len(want), len(middle))
				}
				got, v := through(rt, back.Open(Connection{}), drawInput(rt, middle))
				if v != Continue || !bytes.Equal(got, want) {
					rt.Fatalf("the inverse of %s says %d and gives %d bytes, want %d", one, v, len(got), len(want))
				}
			})
		})
	}
}

// Behind a pause everything has come out.
func TestNothingWaitsBehindAPause(t *testing.T) {
	for _, one := range []string{`"gzip"`, `{"seal": {"key": 7}}`} {
		there, _ := made(t, one, ToServer)
		list, _ := ParseList("run", []json.RawMessage{json.RawMessage(one)})
		back, err := Reverse(list)[0].Make(Surroundings{Keys: testKeys})
		if err != nil {
			t.Fatal(err)
		}
		h, g := there.Open(Connection{}).Transform, back.Open(Connection{}).Transform
		for i := range 10 {
			want := []byte(fmt.Sprintf("line %d\n", i))
			_, middle, _ := h.Transform(want, More, make([]byte, 0, 4096))
			_, middle, _ = h.Transform(nil, Pause, middle)
			_, got, v := g.Transform(middle, More, make([]byte, 0, 4096))
			if v != Continue || !bytes.Equal(got, want) {
				t.Errorf("%s: line %d comes out as %q (%d)", one, i, got, v)
			}
		}
	}
}

func TestGzipIsReadByOthers(t *testing.T) {
	f, _ := made(t, `"gzip"`, ToServer)
	rapid.Check(t, func(rt *rapid.T) {
		want := text(rt)
		out, _ := through(rt, f.Open(Connection{}), drawInput(rt, want))
		if len(want) == 0 {
			if len(out) != 0 {
				rt.Fatalf("of nothing come %d bytes", len(out))
			}
			return
		}
		r, err := gzip.NewReader(bytes.NewReader(out))
		if err != nil {
			rt.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want) {
			rt.Fatalf("compress/gzip reads %d bytes, want %d: %v", len(got), len(want), err)
		}
	})
}

func TestGunzipReadsOthers(t *testing.T) {
	f, _ := made(t, `"gunzip"`, ToServer)
	rapid.Check(t, func(rt *rapid.T) {
		want := text(rt)
		var file bytes.Buffer
		w, err := gzip.NewWriterLevel(&file, rapid.SampledFrom([]int{gzip.HuffmanOnly, 0, 1, 5, 9}).Draw(rt, "level"))
		if err != nil {
			rt.Fatal(err)
		}
		if rapid.Bool().Draw(rt, "header") {
			w.Name, w.Comment, w.Extra = "name", "comment", []byte("extra")
		}
		w.Write(want)
		w.Close()
		got, v := through(rt, f.Open(Connection{}), drawInput(rt, file.Bytes()))
		if v != Continue || !bytes.Equal(got, want) {
			rt.Fatalf("gunzip says %d and gives %d bytes, want %d", v, len(got), len(want))
		}
	})
}

func TestGunzipRefusesWhatIsDamagedOrCut(t *testing.T) {
	f, refused := made(t, `"gunzip"`, ToServer)
	var file bytes.Buffer
	w := gzip.NewWriter(&file)
	w.Write(bytes.Repeat([]byte("all work and no play "), 500))
	w.Close()
	good := file.Bytes()
	bad := map[string][]byte{
		"no gzip":              []byte("GET / HTTP/1.1\r\n\r\n"),
		"cut":                  good[:len(good)-1],
		"cut early":            good[:20],
		"another checksum":     append(append([]byte(nil), good[:len(good)-8]...), 1, 2, 3, 4, 5, 6, 7, 8),
		"something behind it":  append(append([]byte(nil), good...), "more bytes"...),
		"reserved flags":       append([]byte{0x1f, 0x8b, 8, 0xe0}, good[4:]...),
		"reserved block type":  append(append([]byte(nil), good[:10]...), 7),
		"copy of what was not": append(append([]byte(nil), good[:10]...), 0x03|0x02<<3, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0),
	}
	n := uint64(0)
	for name, b := range bad {
		if got, v := through(t, f.Open(Connection{}), whole(b)); v != Reset {
			t.Errorf("%s: gunzip says %d and gives %d bytes, want Reset", name, v, len(got))
		}
		n++
	}
	if refused.Load() != n {
		t.Errorf("%d were counted, want %d", refused.Load(), n)
	}
}

// The decompressor agrees with compress/gzip about any bytes, in pieces of any size.
func FuzzInflate(f *testing.F) {
	for _, level := range []int{gzip.HuffmanOnly, 0, 1, 9} {
		var file bytes.Buffer
		w, _ := gzip.NewWriterLevel(&file, level)
		w.Write(bytes.Repeat([]byte("fuzz me, and me "), 30))
		w.Close()
		f.Add(file.Bytes(), uint8(3), uint8(100))
	}
	f.Fuzz(func(t *testing.T, file []byte, piece, room uint8) {
		var want []byte
		r, err := gzip.NewReader(bytes.NewReader(file))
		if err == nil {
			want, err = io.ReadAll(io.LimitReader(r, 1<<20))
			if len(want) == 1<<20 {
				return
			}
		}
		in := input{room: []int{int(room) + 1}}
		for p := file; len(p) > 0; {
			n := min(len(p), int(piece)+1)
			in.pieces, in.pauses = append(in.pieces, p[:n]), append(in.pauses, false)
			p = p[n:]
		}
		got, v := through(t, (&decompress{}).Open(Connection{}), in)
		if len(file) == 0 {
			return
		}
		// compress/gzip checks the header's checksum, too; ours is content with the data's.
		if headerSum := len(file) > 3 && file[3]&2 != 0; headerSum {
			return
		}
		if (v == Continue) != (err == nil) || err == nil && !bytes.Equal(got, want) {
			t.Errorf("got %d bytes and %d, compress/gzip %d bytes and %v", len(got), v, len(want), err)
		}
	})
}

func TestOpenRefusesWhatIsNotSealedForIt(t *testing.T) {
	seal, _ := made(t, `{"seal": {"key": 7}}`, ToServer)
	sealed, _ := through(t, seal.Open(Connection{}), whole([]byte("attack at dawn")))
	again, _ := through(t, seal.Open(Connection{}), whole([]byte("attack at dawn")))
	if bytes.Equal(sealed, again) {
		t.Fatal("two connections have the same bytes on the wire")
	}
	changed := func(i int) []byte {
		b := bytes.Clone(sealed)
		b[i] ^= 1
		return b
	}
	final := len(sealed) - recordMore
	for name, c := range map[string]struct {
		key   string
		side  Side
		bytes []byte
	}{
		"another key":             {"8", ToServer, sealed},
		"the other direction":     {"7", ToClient, sealed},
		"another magic":           {"7", ToServer, changed(0)},
		"another number":          {"7", ToServer, changed(7)},
		"another salt":            {"7", ToServer, changed(8)},
		"another length":          {"7", ToServer, changed(sealHeader + 1)},
		"another byte":            {"7", ToServer, changed(sealHeader + 2)},
		"cut at a record":         {"7", ToServer, sealed[:final]},
		"cut within a record":     {"7", ToServer, sealed[:final+5]},
		"nothing":                 {"7", ToServer, nil},
		"final too early":         {"7", ToServer, changed(sealHeader)},
		"bytes behind the end":    {"7", ToServer, append(bytes.Clone(sealed), 0)},
		"a record twice":          {"7", ToServer, append(append(bytes.Clone(sealed[:final]), sealed[sealHeader:final]...), sealed[final:]...)},
		"a connection's in it":    {"7", ToServer, append(bytes.Clone(again[:sealHeader]), sealed[sealHeader:]...)},
		"a record that is no one": {"7", ToServer, append(bytes.Clone(sealed[:sealHeader]), 0x7f, 0xff)},
	} {
		open, refused := made(t, `{"open": {"key": `+c.key+`}}`, c.side)
		got, v := through(t, open.Open(Connection{}), whole(c.bytes))
		if v != Reset || refused.Load() != 1 {
			t.Errorf("%s: open says %d, counts %d and gives %q; want Reset", name, v, refused.Load(), got)
		}
	}
}

func TestKeysDoNotPrint(t *testing.T) {
	var k Key
	if err := k.UnmarshalText([]byte(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, KeySize)))); err != nil || k[0] != 7 {
		t.Fatal(err, k[0])
	}
	printed := fmt.Sprintf("%v %+v %#v %s %x", k, k, k, k, k)
	j, _ := json.Marshal(Keys{1: k})
	if all := printed + string(j); strings.Contains(all, "7, 7") || strings.Contains(all, "7 7") || strings.Contains(all, "0707") {
		t.Errorf("a key prints as %s", all)
	}
}

// The files of keys are those of all entries that need one; an entry's inverse has the same key.
func TestKeyFilesOfLists(t *testing.T) {
	const seven, nine = `{"seal": {"key": 7, "file": "/k/7"}}`, `{"open": {"key": 9, "file": "/k/9"}}`
	files, err := KeyFiles([]string{`"count"`, seven, nine}, []string{`{"open": {"key": 7, "file": "/k/7"}}`})
	if want := map[uint32]string{7: "/k/7", 9: "/k/9"}; err != nil || !maps.Equal(files, want) {
		t.Errorf("%v, %v; want %v", files, err, want)
	}
	if files, err := KeyFiles([]string{`"gzip"`}, nil); err != nil || len(files) != 0 {
		t.Errorf("of functions without keys: %v, %v", files, err)
	}
	if _, err := KeyFiles([]string{seven, `{"seal": {"key": 7, "file": "/k/8"}}`}); err == nil || !strings.Contains(err.Error(), "key 7 is in /k/7 and in /k/8") {
		t.Errorf("one number in two files: %v", err)
	}
	list, err := ParseList("run", []json.RawMessage{json.RawMessage(seven), json.RawMessage(nine)})
	if err != nil {
		t.Fatal(err)
	}
	back := Reverse(list)
	if back[0].Name != "seal" || *back[0].Key != (KeyFile{9, "/k/9"}) || back[1].Name != "open" || *back[1].Key != (KeyFile{7, "/k/7"}) {
		t.Errorf("the way back has %+v", back)
	}
}

// A search finds what regexp finds in the whole, whatever pieces the bytes come in.
func TestMatchFindsWhatRegexpFinds(t *testing.T) {
	patterns := []string{`abc`, `a+b`, `(ab|ba)*c`, `^ab`, `ba$`, `\bab\b`, `a.{3}b`, `(?i)aB`, `[^ab]a`, `(?m)^b`, `(?s)a.b`, `a\Bb`, `(?m)a$`, `a{3,5}b?c`, `b.?A`, `(a|A)b{2}`, `\n`}
	rapid.Check(t, func(rt *rapid.T) {
		pattern := rapid.SampledFrom(patterns).Draw(rt, "pattern")
		data := []byte(rapid.StringOfN(rapid.SampledFrom([]rune("aabbc \nA")), 0, 40, -1).Draw(rt, "data"))
		settings, _ := json.Marshal(map[string]any{"patterns": []string{pattern}})
		f, found := made(t, `{"match": `+string(settings)+`}`, ToServer)
		h := f.Open(Connection{}).Inspector
		v, rest := Continue, data
		for v == Continue && len(rest) > 0 {
			n := rapid.IntRange(1, len(rest)).Draw(rt, "piece")
			v = h.Inspect(rest[:n], More)
			rest = rest[n:]
		}
		if v == Continue {
			v = h.Inspect(nil, End)
		}
		want := regexp.MustCompile(pattern).Match(data)
		if (v == Reset) != want || (found.Load() == 1) != want {
			rt.Fatalf("%q in %q: verdict %d, %d counted, want match %v", pattern, data, v, found.Load(), want)
		}
	})
}

// A byte that completes a match is not sent on: the verdict comes with it.
func TestMatchSaysSoWithTheLastByte(t *testing.T) {
	f, _ := made(t, `{"match": {"literals": ["attack"], "patterns": ["x[0-9]{2}"]}}`, ToServer)
	for text, at := range map[string]int{"an attack at dawn": 8, "ax1x12": 5, "xx99": 3} {
		h := f.Open(Connection{}).Inspector
		for i := range len(text) {
			if v := h.Inspect([]byte{text[i]}, More); (v == Reset) != (i == at) {
				t.Fatalf("%q: verdict %d at byte %d, want Reset at %d", text, v, i, at)
			} else if v == Reset {
				break
			}
		}
	}
}

func TestMatchActs(t *testing.T) {
	for _, c := range []struct {
		settings, data string
		end            bool
		want           Verdict
		counted        uint64
	}{
		{`{"literals": ["evil"]}`, "evil", false, Reset, 1},
		{`{"literals": ["evil"]}`, "good", false, Continue, 0},
		{`{"literals": ["evil"]}`, "good", true, Done, 0},
		{`{"literals": ["evil"], "bytes": 4}`, "goodevil", false, Done, 0},
		{`{"literals": ["evil"], "bytes": 4}`, "evil", false, Reset, 1},
		{`{"literals": ["evil"], "then": "mark"}`, "so evil", false, Done, 1},
		{`{"patterns": ["^GET "], "then": "pass", "otherwise": "reset", "bytes": 4}`, "GET /", false, Done, 1},
		{`{"patterns": ["^GET "], "then": "pass", "otherwise": "reset", "bytes": 4}`, "POST /", false, Reset, 0},
		{`{"patterns": ["^GET "], "then": "pass", "otherwise": "reset"}`, "GET", true, Reset, 0},
		{`{"literals": ["ü\u0000"]}`, "a\xc3\xbc\x00", false, Reset, 1},
		{`{"patterns": ["\\xff\\x00{2}"]}`, "a\xff\x00\x00", false, Reset, 1},
	} {
		f, counted := made(t, `{"match": `+c.settings+`}`, ToServer)
		h := f.Open(Connection{}).Inspector
		v := h.Inspect([]byte(c.data), More)
		if v == Continue && c.end {
			v = h.Inspect(nil, End)
		}
		if v != c.want || counted.Load() != c.counted {
			t.Errorf("%s on %q: verdict %d, %d counted, want %d, %d", c.settings, c.data, v, counted.Load(), c.want, c.counted)
		}
	}
}

// An automaton that would grow without end is begun anew; searches that are under way go
// on in it.
func TestMatchOfManyStatesStaysSmall(t *testing.T) {
	f, _ := made(t, `{"match": {"patterns": ["a[ab]{14}c"]}}`, ToServer)
	m := f.(*match)
	early := f.Open(Connection{}).Inspector
	early.Inspect([]byte("a"), More)
	long := f.Open(Connection{}).Inspector
	seed := uint32(1)
	b := make([]byte, 100_000)
	for i := range b {
		seed = seed*1664525 + 1013904223
		b[i] = "ab"[seed>>31]
	}
	if v := long.Inspect(b, More); v != Continue {
		t.Fatalf("verdict %d", v)
	}
	if n := len(m.dfa.states); n > statesMax {
		t.Errorf("%d states, more than %d", n, statesMax)
	}
	if v := early.Inspect([]byte("bbbbbbbbbbbbbbc"), More); v != Reset {
		t.Errorf("a search from before says %d, want Reset", v)
	}
}

func TestLimitHoldsTheRate(t *testing.T) {
	f, _ := made(t, `{"limit": {"connection": 100000, "all": 150000}}`, ToServer)
	gates := []Gate{f.Open(Connection{}).Gate, f.Open(Connection{}).Gate, f.Open(Connection{}).Gate}
	var moved [3]int
	now := time.Duration(0)
	for now < 10*time.Second {
		next := time.Second
		for i, g := range gates[:2] {
			for {
				n, wait := g.Take(64<<10, now)
				if n == 0 {
					next = min(next, max(wait, time.Millisecond))
					break
				}
				g.Return(n / 2) // only a half was there
				moved[i] += n - n/2
			}
		}
		now += next
	}
	// 10 s, and a bucket more.
	if all := moved[0] + moved[1]; all < 1_400_000 || all > 1_600_000 {
		t.Errorf("%d bytes in 10 s, want 1500000", all)
	}
	for i, n := range moved[:2] {
		if n > 1_020_000 {
			t.Errorf("connection %d moved %d bytes in 10 s, want at most 1000000", i, n)
		}
	}
}

func TestListsNameEachMistake(t *testing.T) {
	for text, says := range map[string]string{
		`3`:                               "expect the name of a function",
		`"gz"`:                            `"gz" is not a function; expect one of count, gunzip, gzip, identity, limit, match, open, seal, xor`,
		`{"gzip": {"level": 0}}`:          "level is 0; expect 1 to 9",
		`{"gunzip": {"level": 1}}`:        `unknown field "level"`,
		`{"limit": {}}`:                   "neither connection nor all is set",
		`{"limit": {"all": -1}}`:          "all is -1 bytes per second",
		`"seal"`:                          "key is missing",
		`{"seal": {"keys": {}}}`:          "keys: expect a mapping of numbers to files",
		`{"seal": {"keys": ["/k"]}}`:      "keys: expect a mapping of numbers to files",
		`{"open": {"keys": {"0": "/k"}}}`: `"0" is not the number of a key`,
		`{"open": {"keys": {"4294967296": "/k"}}}`:        `"4294967296" is not the number of a key`,
		`{"seal": {"keys": {"7": "/k"}, "key": 7}}`:       "keys is given, and key or file as well",
		`{"seal": {"keys": {"7": "/k"}, "file": "/one"}}`: "keys is given, and key or file as well",
		`"match"`:                                             "there are no literals and no patterns",
		`{"match": {"literals": [""]}}`:                       "literals[0] is empty",
		`{"match": {"patterns": ["("]}}`:                      "patterns[0]: error parsing regexp: missing closing )",
		`{"match": {"patterns": ["ä"]}}`:                      "is not ASCII",
		`{"match": {"patterns": ["a*"]}}`:                     "matches everything",
		`{"match": {"literals": ["a"], "then": "drop"}}`:      `then is "drop"; expect pass, reset or mark`,
		`{"match": {"literals": ["a"], "then": "pass"}}`:      "then and otherwise are both pass",
		`{"match": {"literals": ["a"], "otherwise": "mark"}}`: `otherwise is "mark"`,
		`{"match": {"literals": ["a"], "bytes": -1}}`:         "bytes is -1",
		`{"xor": {"passes": -1}}`:                             "passes is -1",
	} {
		_, err := ParseList("run", []json.RawMessage{json.RawMessage(text)})
		if err == nil || !strings.Contains(err.Error(), "run[0]: ") || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: got %v, want …%s…", text, err, says)
		}
	}
	list, err := ParseList("run", []json.RawMessage{json.RawMessage(`{"seal": {"key": 9}}`)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := list[0].Make(Surroundings{Keys: testKeys}); err == nil || !strings.Contains(err.Error(), "no key with number 9") {
		t.Errorf("got %v, want that there is no such key", err)
	}
}

func TestReverseIsTheInverseInReverse(t *testing.T) {
	var list []json.RawMessage
	for _, one := range []string{`"count"`, `"gzip"`, `{"seal": {"key": 7}}`, `{"match": {"literals": ["x"]}}`} {
		list = append(list, json.RawMessage(one))
	}
	run, err := ParseList("run", list)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range Reverse(run) {
		names = append(names, e.Name)
	}
	if got := strings.Join(names, " "); got != "match open gunzip count" {
		t.Errorf("back is %s", got)
	}
}
