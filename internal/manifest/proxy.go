package manifest

import (
	"cmp"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
)

// unaware reports whether the function is known to be of this kind.
func (f *function) unaware() bool { return f.kind.ok && f.kind.value == model.KindUnaware }

// proxied reports whether the function is known to get packets without their outer
// headers.
func (f *function) proxied() bool {
	return f.kind.ok && f.kind.value.Behaviour().Proxied() && !f.plain()
}

// local reports whether the function is known to be in its node's own kernel.
func (f *function) local() bool {
	return f.unaware() && f.attach.ok && f.attach.value.local || f.netfilter() && !f.plain() && f.inNode()
}

// proxy is what the file says of how a function without segment routing is reached,
// and the defaults for what it does not say.
func (f *function) proxy() model.Proxy {
	if f.stream() {
		return model.StreamDetour(f.name.value)
	}
	if !f.proxied() {
		return model.Proxy{}
	}
	a := f.attach.value
	p := model.Proxy{
		Local:     a.local,
		To:        a.to.value,
		From:      a.from.value,
		Via:       a.via.value,
		Recognise: f.recognise.value,
		Segments:  f.segments.value,
		Lifetime:  model.LifetimeDefault,
	}
	if f.netfilter() {
		p = model.NetfilterDetour(f.name.value, f.namespaceName())
	}
	p.OnUnknown, p.Rewrites, p.Cache = f.onUnknown.value, f.rewrites.value, f.cacheSize()
	if f.netfilter() && !f.onUnknown.given() {
		p.OnUnknown = model.OnUnknownDefault(f.namespaceName())
	}
	if f.lifetime.ok {
		p.Lifetime = f.lifetime.value
	}
	if !f.recognise.given() && a.local {
		p.Recognise = model.RecogniseMetadata
	}
	if !f.segments.given() && p.Recognise == model.RecogniseMetadata {
		p.Segments = model.SegmentsKeep
	}
	return p
}

func (f *function) cacheSize() int {
	c := f.cache.value
	switch {
	case !f.cache.ok:
		return model.CacheDefault
	case c.size.ok:
		return c.size.value
	}
	return model.CacheFor(c.rate.value, c.delay.value)
}

// checkProxies holds the rules for functions without segment routing, each by itself
// and those of a node together.
func (c *checker) checkProxies() {
	devices := map[nodeDevice]*function{}
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		if !f.kind.ok {
			continue
		}
		c.refuseOthers(f)
		if err := model.CheckIntrusive(f.intrusive.value, f.modelKind()); err != nil {
			c.problemf(f.intrusive.at, "%v", err)
		}
		if f.stream() {
			c.checkStream(f)
			c.checkDevices(f, devices)
		}
		if !f.proxied() {
			continue
		}
		if f.unaware() && !f.attach.given() {
			c.problemf(f.at, `"attach" is missing; a function of kind unaware needs it: local, or interfaces as in {to: eth2, from: eth3}`)
		}
		if f.netfilter() {
			c.checkNetfilter(f)
		}
		c.checkProxy(f)
		c.checkDevices(f, devices)
	}
	c.checkCaches()
}

// nodeDevice is an interface of a node.
type nodeDevice struct{ node, name string }

// checkDevices holds that what comes back by an interface is of one function.
func (c *checker) checkDevices(f *function, devices map[nodeDevice]*function) {
	if !f.node.ok {
		return
	}
	to, from := f.attach.value.to, f.attach.value.from
	names := []item[string]{to, from}
	if p := f.proxy(); (f.netfilter() || f.stream()) && f.name.ok && !p.Local {
		own := []item[string]{{p.To, f.at, true}, {p.From, f.at, true}}
		switch names = own; {
		case f.plain() && f.netfilter():
			a := model.FilterAttached(f.name.value)
			names = append(own, item[string]{a.To, f.at, true}, item[string]{a.From, f.at, true})
		case f.plain():
			names = append(own, to, from)
		}
	}
	for i, name := range names {
		if !name.ok || i%2 == 1 && names[i-1].ok && names[i-1].value == name.value {
			continue
		}
		if n := c.nodes[f.node.value]; n != nil {
			for _, own := range n.interfaces.value {
				if own.name.value == name.value && own.role.ok {
					c.problemf(name.at, "%q is an interface of %s with role %s; a function has interfaces of its own", name.value, f.node.value, own.role.value)
				}
			}
		}
		d := nodeDevice{f.node.value, name.value}
		if other, ok := devices[d]; ok && other != f {
			c.problemf(name.at, "%q is an interface of %s already; packets on it must come from one function", name.value, other.name.value)
			continue
		}
		devices[d] = f
	}
}

// refuseOthers reports settings that functions of this kind do not have.
func (c *checker) refuseOthers(f *function) {
	unaware, netfilter := []model.Kind{model.KindUnaware}, []model.Kind{model.KindNetfilter}
	both := []model.Kind{model.KindUnaware, model.KindNetfilter}
	stream := []model.Kind{model.KindStream}
	settings := []struct {
		name string
		at   place
		of   []model.Kind
	}{
		{"attach", f.attach.at, unaware},
		{"recognise", f.recognise.at, unaware},
		{"segments", f.segments.at, unaware},
		{"namespace", f.namespace.at, netfilter},
		{"arguments", f.arguments.at, netfilter},
		{"zones", f.zones.at, netfilter},
		{"bypass", f.bypass.at, netfilter},
		{"rules", f.rules.at, netfilter},
		{"rules-file", f.rulesFile.at, netfilter},
		{"run", f.run.at, stream},
		{"back", f.back.at, stream},
		{"connect", f.connect.at, stream},
		{"other", f.other.at, stream},
		{"limits", f.limits.at, stream},
		{"on-unknown", f.onUnknown.at, both},
		{"rewrites", f.rewrites.at, both},
		{"cache", f.cache.at, both},
		{"lifetime", f.lifetime.at, both},
	}
	for _, a := range f.addresses {
		settings = append(settings, struct {
			name string
			at   place
			of   []model.Kind
		}{"address", a.at, netfilter})
	}
	for _, s := range settings {
		fits := slices.Contains(s.of, f.kind.value)
		if f.plain() {
			fits = s.name == "limits" || s.name == "attach" && f.unaware() || f.netfilter() && slices.Contains([]string{"namespace", "rules", "rules-file"}, s.name)
		}
		if s.at == (place{}) || fits {
			continue
		}
		if f.plain() {
			of := ""
			if f.netfilter() {
				of = ", which have no argument and keep their addresses"
			}
			c.problemf(s.at, "%s is not for an intrusive function of kind %s: its node makes connections through it%s, and keeps no packet's header; leave it out", s.name, f.kind.value, of)
			continue
		}
		of := s.of[0].String()
		if len(s.of) > 1 {
			of += " and " + s.of[1].String()
		}
		c.problemf(s.at, "%s is for functions of kind %s; a function of kind %s has no such setting", s.name, of, f.kind.value)
	}
}

// checkProxy holds the rules for one function. A setting that could not be read
// breaks no other one.
func (c *checker) checkProxy(f *function) {
	p := f.proxy()
	recognised := f.netfilter() || f.recognise.ok || !f.recognise.given() && f.attach.ok
	if f.recognise.ok && f.attach.ok {
		if err := model.CheckRecognise(p.Recognise, p.Local); err != nil {
			c.problemf(f.recognise.at, "%q %v", p.Recognise, err)
			recognised = false
		}
	}
	if f.onUnknown.ok {
		namespace := ""
		if f.netfilter() {
			namespace = f.namespaceName()
		}
		if err := model.CheckOnUnknown(p.OnUnknown, namespace); err != nil {
			c.problemf(f.onUnknown.at, "%q %v", p.OnUnknown, err)
		}
	}
	if f.rewrites.ok && recognised {
		if err := model.CheckRewrites(p.Rewrites, p.Recognise); err != nil {
			c.problemf(f.rewrites.at, "%t %v", p.Rewrites, err)
		}
	}
	if f.segments.ok && recognised {
		if err := model.CheckSegments(p.Segments, p.Recognise); err != nil {
			c.problemf(f.segments.at, "%q %v", p.Segments, err)
		}
	}
	if f.cache.ok && recognised {
		if err := model.CheckCache(p.Cache, p.Recognise); err != nil {
			c.problemf(f.cache.at, "%d %v", p.Cache, err)
			f.cache.ok = false
		}
	}
	if d := f.cache.value.delay; d.ok && (f.lifetime.ok || !f.lifetime.given()) && d.value >= p.Lifetime {
		c.problemf(d.at, "%q is not less than the lifetime of a header, %s; headers would expire before their packets return", d.value, p.Lifetime)
	}
}

// checkCaches holds that a node can keep what its functions need together.
func (c *checker) checkCaches() {
	type pool struct {
		node      string
		recognise model.Recognise
	}
	sums := map[pool]int{}
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		whole := f.proxied() && f.node.ok && (f.netfilter() || f.attach.ok) && (f.cache.ok || !f.cache.given()) && (f.recognise.ok || !f.recognise.given())
		if !whole {
			continue
		}
		p := f.proxy()
		most, why := model.CacheMax, ""
		if p.Recognise == model.RecogniseMetadata {
			most, why = model.SlotsMax, ", since the index has 16 bits"
		}
		k := pool{f.node.value, p.Recognise}
		before := sums[k]
		sums[k] += p.Cache
		if before <= most && sums[k] > most {
			at := f.cache.at
			if !f.cache.given() {
				at = f.at
			}
			c.problemf(at, "with it, the functions on %s that are recognised by %s keep %d headers; %d are possible%s: give them smaller caches",
				f.node.value, p.Recognise, sums[k], most, why)
		}
	}
}

// passage is a path at a node or in a function.
type passage struct {
	match     model.Match
	chain     *chain
	direction model.Direction
}

func (p passage) String() string { return direct("chain "+p.chain.name.value, p.direction) }

// notePassages enters what checkLocals looks at.
func (c *checker) notePassages(ch *chain) {
	for _, d := range ch.model().Directions() {
		directed := ch.model().Directed(d)
		p := passage{directed.Match, ch, d}
		c.ends[directed.Egress] = append(c.ends[directed.Egress], p)
		for _, name := range directed.Functions {
			if f := c.functions[name]; f.local() {
				c.locals[f] = append(c.locals[f], p)
			}
		}
	}
}

// checkLocals holds that a node can tell, on every way out, a packet that a
// local function took the header of from one that was verified here and needs
// none any more.
func (c *checker) checkLocals() {
	for i := range c.file.functions.value {
		f := &c.file.functions.value[i]
		c.checkLocal(f)
	}
}

func (c *checker) checkLocal(f *function) {
	through, ends := c.locals[f], c.ends[f.node.value]
	matches := func(list []passage) []model.Match {
		var m []model.Match
		for _, p := range list {
			m = append(m, p.match)
		}
		return m
	}
	type found struct {
		other bool // than the one that ends here; a chain that ends where its own function is says more
		i, j  int
	}
	var first *found
	n := 0
	model.EachOverlap(matches(through), matches(ends), func(i, j int) bool {
		f := found{through[i] != ends[j], i, j}
		if first == nil || !f.other && first.other || f.other == first.other && cmp.Or(cmp.Compare(f.i, first.i), cmp.Compare(f.j, first.j)) < 0 {
			first = &f
		}
		n++
		return n < model.OverlapsMax // among so many any will do
	})
	if first == nil {
		return
	}
	end := ends[first.j]
	goes := " and goes through " + f.name.value
	if first.other {
		goes = ", and packets of it go through " + f.name.value + " in " + through[first.i].String()
	}
	at, instead := f.attach.at, "attach "+f.name.value+" to interfaces"
	if f.netfilter() {
		at, instead = f.namespace.at, "give "+f.name.value+" a namespace (own)"
	}
	c.problemf(at, "%s ends at %s%s: a packet of it that was verified and leaves looks like one that has lost its header in a local function; put function or end on another node, or %s",
		end, f.node.value, goes, instead)
}
