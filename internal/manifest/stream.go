package manifest

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/waystamp/waystamp/internal/model"
	streamfunction "github.com/waystamp/waystamp/internal/stream/function"
)

// streamLimits are what connections may take.
type streamLimits struct {
	connections item[int]
	buffer      item[int]
	idle        item[time.Duration]
	halfClosed  item[time.Duration]
}

// stream reports whether the function is known to get connections: it is of this kind, or
// intrusive and of kind unaware or netfilter.
func (f *function) stream() bool {
	return f.kind.ok && f.kind.value == model.KindStream || f.plain()
}

// plain reports whether the function is known to get plain connections: its node opens what is
// sealed, and the function knows nothing of it.
func (f *function) plain() bool {
	return (f.unaware() || f.netfilter()) && f.intrusive.ok && f.intrusive.value
}

// modelKind is the kind that the function has for its node.
func (f *function) modelKind() model.Kind {
	if f.plain() {
		return model.KindStream
	}
	return f.kind.value
}

func (c *checker) isStream(name string) bool {
	f := c.functions[name]
	return f != nil && f.stream()
}

func (c *checker) nodeOf(name string) string { return c.functions[name].node.value }

// readStreamList reads functions, each a name, or a mapping of a name to its settings. It
// is ok only if all of it is. Each becomes the JSON that a worker reads.
func readStreamList(c cursor) item[[]string] {
	v := item[[]string]{at: c.at}
	if c.takes("list of functions on bytes, each a name (%s) or a mapping of a name to its settings, as in `[{gzip: {level: 1}}]`; at most %d",
		strings.Join(streamfunction.Names(), ", "), streamfunction.ListMax) {
		return v
	}
	before := len(c.r.problems)
	c.each(func(c cursor) {
		before := len(c.r.problems)
		text, err := json.Marshal(c.value(0))
		if err != nil || len(c.r.problems) > before {
			return // reported
		}
		v.value = append(v.value, string(text))
		if _, err := parseStreamEntry(string(text)); err != nil {
			c.r.problemf(c.at, "%v", err)
		}
	})
	if n := len(v.value); n > streamfunction.ListMax {
		c.r.problemf(c.at, "%d functions; a list has at most %d", n, streamfunction.ListMax)
	}
	v.ok = len(c.r.problems) == before
	return v
}

// parseStreamEntry reads an entry, and makes the function once: what it needs from its
// surroundings shows then.
func parseStreamEntry(text string) (streamfunction.Entry, error) {
	list, err := streamfunction.ParseList("", []json.RawMessage{json.RawMessage(text)})
	if err != nil {
		return streamfunction.Entry{}, fmt.Errorf("%s", strings.TrimPrefix(err.Error(), "[0]: "))
	}
	if k := list[0].Key; k != nil {
		if err := model.CheckKeyFile(k.File); err != nil {
			return list[0], fmt.Errorf("%s: file %w", list[0].Name, err)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(list[0].Keys)) {
		if err := model.CheckKeyFile(list[0].Keys[n]); err != nil {
			return list[0], fmt.Errorf("%s: keys: %d: file %w", list[0].Name, n, err)
		}
	}
	return list[0], nil
}

// valueDepth is how deep the settings of a function may be.
const valueDepth = 8

// value is a node as JSON has it.
func (c cursor) value(depth int) any {
	if depth > valueDepth {
		c.r.problemf(c.at, "is too deep; settings have at most %d levels", valueDepth)
		return nil
	}
	switch n := c.node.(type) {
	case *ast.MappingNode:
		m := map[string]any{}
		c.entries(func(name string, c cursor) { m[name] = c.value(depth + 1) })
		return m
	case *ast.SequenceNode:
		list := []any{}
		c.each(func(c cursor) { list = append(list, c.value(depth+1)) })
		return list
	case *ast.BoolNode:
		return n.Value
	case *ast.IntegerNode, *ast.FloatNode:
		text := n.GetToken().Value
		if !json.Valid([]byte(text)) {
			c.r.problemf(c.at, "%s is not a number as JSON has it", quote(text))
			return nil
		}
		return json.Number(text)
	}
	return c.lines(1 << 16).value
}

func readConnect(c cursor) item[string] {
	return c.checked("first or early", func(s string) error {
		if s != "first" && s != "early" {
			return fmt.Errorf("is not a setting of connect; expect first or early")
		}
		return nil
	})
}

// readStreamLimits is ok only if all of it is.
func readStreamLimits(c cursor) item[streamLimits] {
	v := item[streamLimits]{at: c.at}
	l := &v.value
	before := len(c.r.problems)
	within := func(c cursor) item[time.Duration] { return c.duration(model.StreamLimitMin, model.StreamLimitMax) }
	c.fields(
		field{"connections", false, into(&l.connections, func(c cursor) item[int] { return c.integer(1, model.StreamConnectionsMax) })},
		field{"buffer", false, into(&l.buffer, func(c cursor) item[int] { return c.integer(model.StreamBufferMin, model.StreamBufferMax) })},
		field{"idle", false, into(&l.idle, within)},
		field{"half-closed", false, into(&l.halfClosed, within)},
	)
	v.ok = len(c.r.problems) == before
	return v
}

// streamModel is what the file says of a function of that kind, with the defaults for what
// it does not say.
func (f *function) streamModel() model.Stream {
	if !f.stream() {
		return model.Stream{}
	}
	s := model.Stream{
		Run: f.run.value, Back: f.back.value, Early: f.connect.value == "early", Other: f.other.value,
		Connections: model.StreamConnectionsDefault, Buffer: model.StreamBufferDefault,
		Idle: model.StreamIdleDefault, HalfClosed: model.StreamHalfClosedDefault,
	}
	if a := f.attach.value; f.plain() && f.netfilter() {
		s.Attached = model.FilterAttached(f.name.value)
	} else if f.plain() {
		s.Attached = model.Attached{To: a.to.value, From: a.from.value, Via: a.via.value}
	}
	l := f.limits.value
	if l.connections.ok {
		s.Connections = l.connections.value
	}
	if l.buffer.ok {
		s.Buffer = l.buffer.value
	}
	if l.idle.ok {
		s.Idle = l.idle.value
	}
	if l.halfClosed.ok {
		s.HalfClosed = l.halfClosed.value
	}
	return s
}

// checkStream holds the rules for a function's own settings.
func (c *checker) checkStream(f *function) {
	if f.intrusive.value && f.other.ok && f.other.value != model.OtherRefuse {
		c.problemf(f.other.at, "an intrusive function takes sealed connections and nothing else; leave \"other\" out")
	}
	switch {
	case f.plain():
		c.checkPlain(f)
	case !f.run.given():
		c.problemf(f.at, "\"run\" is missing; a function of kind stream needs a list of operations on bytes, as in run: [gzip]")
	case f.run.ok && len(f.run.value) == 0:
		c.problemf(f.run.at, "no functions; give run: [identity] for a function that changes nothing")
	case f.back.given() && f.back.ok && len(f.back.value) == 0:
		c.problemf(f.back.at, "no functions; leave it out for the inverse of run, or give back: [identity] for no change")
	case f.run.ok && (f.back.ok || !f.back.given()):
		if _, err := streamfunction.KeyFiles(f.run.value, f.back.value); err != nil {
			c.problemf(f.at, "%v", err)
		}
	}
}

// checkPlain holds the rules for where plain connections go through.
func (c *checker) checkPlain(f *function) {
	a := f.attach.value
	switch {
	case f.netfilter():
		if err := model.CheckFilterNamespace(f.namespaceName()); err != nil && f.namespace.ok {
			c.problemf(f.namespace.at, "%q %v", f.namespace.value, err)
		}
		c.checkRulesOnce(f)
	case !f.attach.given():
		c.problemf(f.at, `"attach" is missing; plain connections go through interfaces of their own: expect as in {to: eth2, from: eth3}`)
	case !f.attach.ok:
	case a.local:
		c.problemf(f.attach.at, "local is the node's own kernel, where what is opened would be in clear on all of the node; an intrusive function has interfaces: expect as in {to: eth2, from: eth3}")
	default:
		if err := f.streamModel().Attached.Check(); err != nil {
			c.problemf(f.attach.at, "%v", err)
		}
	}
}

// parametersModel are the chain's parameters, those of an entry and of its entry on the way back together. With functions of their own on the
// way back, that has the parameters which are given there.
func (ch *chain) parametersModel() (out []model.Parameters) {
	for _, p := range ch.parameters {
		i := slices.IndexFunc(out, func(o model.Parameters) bool { return o.Function == p.function.value })
		if i < 0 {
			i, out = len(out), append(out, model.Parameters{Function: p.function.value})
		}
		if !p.back {
			out[i].Forward = p.forward.value
		}
		if p.back == ch.back.given() {
			out[i].Reverse = p.reverse.value
		}
	}
	return out
}

// checkParameters holds that functions take the parameters of a chain's visits, and that visits have those that a function needs. It reports whether
// they do.
func (c *checker) checkParameters(ch *chain) bool {
	ok := true
	bad := func(at place, format string, args ...any) {
		ok = false
		c.problemf(at, format, args...)
	}
	all := ch.parametersModel()
	at := map[string]place{}
	for _, p := range ch.parameters {
		f := c.functions[p.function.value]
		is := p.forward
		if !is.given() {
			is = p.reverse
		}
		if !p.function.ok || f == nil || !f.kind.ok || p.forward.given() && !p.forward.ok || p.reverse.given() && !p.reverse.ok {
			return false // reported
		}
		switch err := model.CheckParametersOf(model.Function{Kind: f.kind.value, Intrusive: f.intrusive.value}); {
		case err != nil:
			bad(is.at, "%q %v", f.name.value, err)
		case !p.back && ch.back.given() && p.reverse.at != p.forward.at && p.reverse.given():
			bad(p.reverse.at, "return names the functions of the way back; give the parameters of %s there, as in return: {functions: [{name: %s, parameters: %s}]}", f.name.value, f.name.value, model.ParametersText(p.reverse.value))
		}
		if at[f.name.value] == (place{}) {
			at[f.name.value] = is.at
		}
	}
	if !ok {
		return false
	}
	for _, name := range ch.functions.value {
		f := c.functions[name.value]
		if !name.ok || f == nil || !f.kind.ok || f.kind.value != model.KindStream || !f.run.ok || f.back.given() && !f.back.ok {
			continue
		}
		p := model.Parameters{}
		if i := slices.IndexFunc(all, func(p model.Parameters) bool { return p.Function == name.value }); i >= 0 {
			p = all[i]
		}
		if !ch.both.value {
			p.Reverse = p.Forward // that it needs both directions is reported
		}
		if _, _, err := streamfunction.WithParameters(f.run.value, f.back.value, p.Forward, p.Reverse); err != nil {
			where, given := at[name.value]
			if !given {
				where = name.at
			}
			bad(where, "%q: %s", name.value, err)
		}
	}
	return ok
}
