package pot

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/yamlfile"
)

// Bounds of a profile file. A hop's position is one byte on the wire.
const (
	profileBytesMax = 1 << 20
	profileTextMax  = 256 // bytes of one value
	profileHopsMax  = math.MaxUint8 + 1
)

// Profile is a path as somebody wrote it down, with all its secrets.
//
// Under pot and opot it has the hops' shares, but not the x that they come from,
// and is opot if any hop has a mask. Under keyed and keyed-flow it has the keys of
// the hops that stamp, and the egress, which has them all, is behind the last.
type Profile struct {
	Header   Header
	Shares   []Share // of the hops in their order; the first is the headend
	Verifier Verifier
	Flow     Flow // of the packet; keyed-flow
}

// ParseProfile reads a profile in YAML. It is strict; its error, a
// *ProfileError, names every problem of the file, by its lines. file is how
// messages name the file.
func ParseProfile(file string, text []byte) (Profile, error) {
	r := profileReader{file: file}
	if len(text) > profileBytesMax {
		r.problem(nil, "", "the file is longer than %d bytes; that is no profile", profileBytesMax)
		return Profile{}, r.err()
	}
	r.lines = strings.Split(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n")
	p := r.read(text)
	if err := r.err(); err != nil {
		return Profile{}, err
	}
	return p, nil
}

// ProfileError says all that is wrong with a profile file.
type ProfileError struct {
	Problems []string // one sentence each, with file, line and column; then the line itself, with a caret
}

func (e *ProfileError) Error() string { return strings.Join(e.Problems, "\n") }

// ParseNumber reads a number from 0 to 2^64-1: decimal, or hexadecimal after
// 0x. No sign, no separators, and no leading zero that might mean octal.
func ParseNumber(s string) (uint64, error) {
	digits, base := s, 10
	if rest, ok := strings.CutPrefix(strings.ToLower(s), "0x"); ok {
		digits, base = rest, 16
	} else if len(s) > 1 && s[0] == '0' && strings.Trim(s, "0123456789") == "" {
		return 0, fmt.Errorf("%q starts with a zero; write it in decimal without, or in hexadecimal with 0x", s)
	}
	n, err := strconv.ParseUint(digits, base, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s does not fit in 64 bits", s)
	case err != nil:
		return 0, fmt.Errorf("%q is not a number from 0 to 2^64-1, decimal or hexadecimal with 0x", s)
	}
	return n, nil
}

// checkOrder says whether Evaluate can visit hops in this order.
func (p Profile) checkOrder(order []int) error {
	if len(order) == 0 {
		return errors.New("the order visits no hop")
	}
	for _, hop := range order {
		if hop < 1 || hop > len(p.Shares) {
			return fmt.Errorf("the order names hop %d; the profile has hops 1 to %d", hop, len(p.Shares))
		}
	}
	return nil
}

// profileReader walks the tree of a file and notes each problem where it is.
type profileReader struct {
	file     string
	lines    []string
	problems []problem
}

type problem struct {
	line, column int // 0: of the file as a whole
	text         string
}

func (r *profileReader) problem(at *token.Token, field, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if field != "" {
		text = field + ": " + text
	}
	p := problem{text: text}
	if at != nil && at.Position != nil {
		p.line, p.column = at.Position.Line, at.Position.Column
	}
	r.problems = append(r.problems, p)
}

func (r *profileReader) err() error {
	if len(r.problems) == 0 {
		return nil
	}
	slices.SortStableFunc(r.problems, func(a, b problem) int {
		return cmp.Or(cmp.Compare(a.line, b.line), cmp.Compare(a.column, b.column))
	})
	var e ProfileError
	for _, p := range r.problems {
		e.Problems = append(e.Problems, r.render(p))
	}
	return &e
}

func (r *profileReader) render(p problem) string {
	if p.line < 1 || p.line > len(r.lines) || p.column < 1 {
		return fmt.Sprintf("%s: %s", r.file, p.text)
	}
	gutter := fmt.Sprintf("%4d | ", p.line)
	line, column := yamlfile.Around(strings.ReplaceAll(r.lines[p.line-1], "\t", " "), p.column-1)
	return fmt.Sprintf("%s:%d:%d: %s\n%s%s\n%*s",
		r.file, p.line, p.column, p.text, gutter, string(line), len(gutter)+column+1, "^")
}

func (r *profileReader) read(text []byte) Profile {
	var p Profile
	f, err := yamlfile.Parse(string(text))
	if err != nil {
		r.syntax(err)
		return p
	}
	var body ast.Node
	for _, d := range f.Docs {
		switch {
		case d.Body == nil:
		case body != nil:
			r.problem(d.Body.GetToken(), "", "a second document; a profile file holds one")
		default:
			body = d.Body
		}
	}
	if body == nil {
		r.problem(nil, "", "the file is empty; a profile has prime-number, validator-key and hops, or scheme and hops")
		return p
	}
	if named(body, "scheme") {
		return r.keyed(body)
	}
	fields := r.mapping(body, "", []string{"prime-number", "validator-key", "hops"}, nil)
	if fields == nil {
		return p
	}
	prime := r.prime(fields)
	p.Verifier.Secret = r.residue(fields, "", "validator-key", prime)
	p.Header = Header{Scheme: model.SchemePoT, Path: 1}
	if n, ok := fields["hops"]; ok {
		p.Shares = r.hops(n, prime, &p.Header.Scheme)
	}
	return p
}

// named: is there a field of that name?
func named(n ast.Node, name string) bool {
	m, ok := n.(*ast.MappingNode)
	return ok && slices.ContainsFunc(m.Values, func(v *ast.MappingValueNode) bool { return v.Key.GetToken().Value == name })
}

// keyed reads a profile that says its scheme.
func (r *profileReader) keyed(body ast.Node) Profile {
	flow := []string{"binding-key", "flow"}
	fields := r.mapping(body, "", []string{"scheme", "path", "epoch", "hops"}, flow)
	p := Profile{}
	text, at, ok := r.scalar(fields, "", "scheme", "keyed or keyed-flow")
	if !ok {
		return p
	}
	if err := p.Header.Scheme.UnmarshalText([]byte(text)); err != nil || !p.Header.Scheme.Keyed() {
		r.problem(at, "scheme", "%q is not keyed or keyed-flow; pot and opot are not named: their profile has prime-number, validator-key and hops", text)
		return p
	}
	bound := p.Header.Scheme == model.SchemeKeyedFlow
	for _, name := range flow {
		switch n := fields[name]; {
		case bound && n == nil:
			r.problem(at, name, "the field is missing; keyed-flow needs it")
		case !bound && n != nil:
			r.problem(n.GetToken(), name, "keyed has none; expect scheme: keyed-flow")
		}
	}
	p.Header.Path = uint32(r.upTo(fields, "", "path", math.MaxUint32))
	p.Header.Epoch = uint8(r.upTo(fields, "", "epoch", math.MaxUint8))
	var bind Key
	if bound {
		bind = r.key(fields, "", "binding-key")
		if n := fields["flow"]; n != nil {
			p.Flow = r.flow(n)
		}
	}
	n, ok := fields["hops"]
	if !ok {
		return p
	}
	list, ok := n.(*ast.SequenceNode)
	if !ok {
		r.problem(n.GetToken(), "hops", "expect a list of hops, found %s", describe(n))
		return p
	}
	if len(list.Values) < PositionsMin-1 || len(list.Values) > PositionsMax-1 {
		r.problem(list.GetToken(), "hops", "a path has %d to %d hops that stamp; this list has %d", PositionsMin-1, PositionsMax-1, len(list.Values))
		return p
	}
	for i, v := range list.Values {
		path := fmt.Sprintf("hops[%d].", i)
		s := Share{Position: uint8(i), Bind: bind, Key: r.key(r.mapping(v, path, []string{"key"}, nil), path, "key")}
		p.Shares = append(p.Shares, s)
		p.Verifier.Keys = append(p.Verifier.Keys, s.Key)
	}
	return p
}

// flow is who sends to whom.
func (r *profileReader) flow(n ast.Node) (f Flow) {
	const path = "flow."
	fields := r.mapping(n, path, []string{"source", "destination", "protocol"}, []string{"source-port", "destination-port"})
	f.Source, f.Destination = r.address(fields, path, "source"), r.address(fields, path, "destination")
	f.Protocol = uint8(r.upTo(fields, path, "protocol", math.MaxUint8))
	f.SourcePort = uint16(r.upTo(fields, path, "source-port", math.MaxUint16))
	f.DestinationPort = uint16(r.upTo(fields, path, "destination-port", math.MaxUint16))
	if f.Source.IsValid() && f.Destination.IsValid() && f.Source.Is4() != f.Destination.Is4() {
		r.problem(fields["destination"].GetToken(), path+"destination", "%s and %s are not of one version of IP", f.Source, f.Destination)
	}
	return f
}

func (r *profileReader) address(fields map[string]ast.Node, path, name string) netip.Addr {
	text, at, ok := r.scalar(fields, path, name, "an address")
	if !ok {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		r.problem(at, path+name, "%q is not an IPv4 or IPv6 address", text)
		return netip.Addr{}
	}
	return a.Unmap()
}

// upTo is a number that is not above most.
func (r *profileReader) upTo(fields map[string]ast.Node, path, name string, most uint64) uint64 {
	v, ok := r.number(fields, path, name)
	if ok && v > most {
		r.problem(fields[name].GetToken(), path+name, "%d is above %d", v, most)
		return 0
	}
	return v
}

func (r *profileReader) key(fields map[string]ast.Node, path, name string) (k Key) {
	text, at, ok := r.scalar(fields, path, name, "32 hex digits")
	if !ok {
		return k
	}
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(k) {
		// Not what it is: that may be most of a secret.
		r.problem(at, path+name, "a key is 32 hex digits, the bytes in the order of SipHash's reference code; this has %d characters", len(text))
		return k
	}
	copy(k[:], b)
	return k
}

func (r *profileReader) hops(n ast.Node, prime uint64, scheme *model.Scheme) []Share {
	list, ok := n.(*ast.SequenceNode)
	if !ok {
		r.problem(n.GetToken(), "hops", "expect a list of hops, found %s", describe(n))
		return nil
	}
	if len(list.Values) < PositionsMin || len(list.Values) > profileHopsMax {
		r.problem(list.GetToken(), "hops", "a path has %d to %d hops; this list has %d", PositionsMin, profileHopsMax, len(list.Values))
		return nil
	}
	var shares []Share
	for i, v := range list.Values {
		path := fmt.Sprintf("hops[%d].", i)
		fields := r.mapping(v, path, []string{"secret-share", "lpc", "public-polynomial"}, []string{"upstream-mask", "downstream-mask"})
		if fields == nil {
			continue
		}
		shares = append(shares, Share{
			Position: uint8(i),
			Polynomial: Polynomial{
				Prime:  prime,
				Share:  r.residue(fields, path, "secret-share", prime),
				Public: r.residue(fields, path, "public-polynomial", prime),
				LPC:    r.residue(fields, path, "lpc", prime),
				Up:     r.mask(fields, path, "upstream-mask", scheme),
				Down:   r.mask(fields, path, "downstream-mask", scheme),
			},
		})
	}
	return shares
}

// mapping gives the values of a mapping by name, or nil if n is none. Every
// name is in required or optional, and the required ones are there, or there
// is a problem.
func (r *profileReader) mapping(n ast.Node, path string, required, optional []string) map[string]ast.Node {
	where := strings.TrimSuffix(path, ".")
	var values []*ast.MappingValueNode
	switch m := n.(type) {
	case *ast.MappingNode:
		values = m.Values
	case *ast.MappingValueNode:
		values = []*ast.MappingValueNode{m}
	default:
		r.problem(n.GetToken(), where, "expect %s, each with a value; found %s", join(required), describe(n))
		return nil
	}
	fields := make(map[string]ast.Node, len(values))
	for _, v := range values {
		key := v.Key.GetToken()
		switch {
		case !slices.Contains(required, key.Value) && !slices.Contains(optional, key.Value):
			r.problem(key, where, "unknown field %q; expect %s", yamlfile.Shorten(64, key.Value), join(slices.Concat(required, optional)))
		case fields[key.Value] != nil:
			r.problem(key, path+key.Value, "the field is there twice")
		default:
			fields[key.Value] = v.Value
		}
	}
	at := n.GetToken()
	if len(values) > 0 {
		at = values[0].Key.GetToken()
	}
	for _, name := range required {
		if fields[name] == nil {
			r.problem(at, path+name, "the field is missing")
		}
	}
	return fields
}

// prime is the prime number, or noPrime after a problem: nobody can say what
// is below it then.
func (r *profileReader) prime(fields map[string]ast.Node) uint64 {
	const name = "prime-number"
	v, ok := r.number(fields, "", name)
	if !ok {
		return noPrime
	}
	switch at := fields[name].GetToken(); {
	case v >= 1<<PrimeBits:
		r.problem(at, name, "%s is not below 2^63", at.Value)
		return noPrime
	case !isPrime(v):
		r.problem(at, name, "%s is not a prime number", at.Value)
		return noPrime
	}
	return v
}

const noPrime = 0

// residue is a number below the prime. Whatever is wrong with it is noted.
func (r *profileReader) residue(fields map[string]ast.Node, path, name string, prime uint64) uint64 {
	v, ok := r.number(fields, path, name)
	if ok && prime != noPrime && v >= prime {
		at := fields[name].GetToken()
		r.problem(at, path+name, "%s is not below the prime number %d", at.Value, prime)
	}
	return v
}

func (r *profileReader) number(fields map[string]ast.Node, path, name string) (uint64, bool) {
	text, at, ok := r.scalar(fields, path, name, "a number")
	if !ok {
		return 0, false
	}
	v, err := ParseNumber(text)
	if err != nil {
		r.problem(at, path+name, "%v", err)
		return 0, false
	}
	return v, true
}

func (r *profileReader) mask(fields map[string]ast.Node, path, name string, scheme *model.Scheme) Mask {
	text, at, ok := r.scalar(fields, path, name, "32 hex digits")
	if !ok {
		return Mask{}
	}
	*scheme = model.SchemeOPoT
	if len(text) != 32 {
		r.problem(at, path+name, "%q has %d characters; a mask is 32 hex digits, 16 for RND and then 16 for CML", text, len(text))
		return Mask{}
	}
	if _, err := hex.DecodeString(text); err != nil {
		r.problem(at, path+name, "%q is not all hex digits; a mask is 32 of them, 16 for RND and then 16 for CML", text)
		return Mask{}
	}
	rnd, _ := strconv.ParseUint(text[:16], 16, 64)
	cml, _ := strconv.ParseUint(text[16:], 16, 64)
	return Mask{RND: rnd, CML: cml}
}

// scalar is the text of a field as written, without quotes, whatever YAML takes
// it for: a mask of digits alone is not a number.
func (r *profileReader) scalar(fields map[string]ast.Node, path, name, want string) (string, *token.Token, bool) {
	n, ok := fields[name]
	if !ok {
		return "", nil, false // mapping has said so, or it is optional
	}
	switch n.(type) {
	case *ast.IntegerNode, *ast.FloatNode, *ast.StringNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		text := n.GetToken().Value
		if len(text) > profileTextMax {
			r.problem(n.GetToken(), path+name, "%q has %d bytes; a value has at most %d", yamlfile.Shorten(64, text), len(text), profileTextMax)
			return "", nil, false
		}
		return text, n.GetToken(), true
	}
	r.problem(n.GetToken(), path+name, "expect %s, found %s", want, describe(n))
	return "", nil, false
}

func (r *profileReader) syntax(err error) {
	p := problem{text: fmt.Sprintf("the file is not YAML: %v", err)}
	if e, ok := errors.AsType[*yamlfile.Error](err); ok {
		p = problem{e.Line, e.Column, "the file is not YAML: " + e.Message}
	}
	r.problems = append(r.problems, p)
}

func describe(n ast.Node) string {
	switch n.(type) {
	case *ast.NullNode:
		return "nothing"
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		return "an anchor, alias or tag, which a profile does not use"
	case *ast.LiteralNode:
		return "a block of text"
	}
	return fmt.Sprintf("%q", yamlfile.Shorten(64, n.GetToken().Value))
}

func join(names []string) string {
	last := len(names) - 1
	if last == 0 {
		return names[0]
	}
	return strings.Join(names[:last], ", ") + " and " + names[last]
}
