package manifest

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// clients mirrors an entry of clients.
type clients struct {
	at        place
	name      item[string]
	ca        item[string]
	kinds     map[model.IdentityKind]item[string] // what identities are within
	identity  place
	revoked   place
	crl       item[string]
	ocsp      item[bool]
	responder item[string]
	olderThan item[time.Duration]
	lifetime  item[time.Duration]
}

// service mirrors an entry of services.
type service struct {
	at          place
	name        item[string]
	hosts       item[[]item[string]]
	nodes       item[[]item[string]]
	address     item[netip.AddrPort]
	mode        item[string]
	certificate item[string]
	key         item[string]
	signer      item[string]
	clients     item[string]
	from        place // origin
	origin      item[netip.AddrPort]
	originCA    item[string]
	originName  item[string]
	rules       item[[]rule]
	protocol    item[string]
	alpn        item[[]item[string]]
	idle        item[time.Duration]
	headers     place // client-headers
	headerNames [4]item[string]

	destinations item[[]destination]
}

// destination mirrors one of a service.
type destination struct {
	at      place
	host    item[string]
	port    item[int]
	address item[netip.AddrPort]
}

func (d destination) ok() bool { return d.host.ok && d.address.ok && (d.port.ok || !d.port.given()) }

func (d destination) model() model.Destination {
	m := model.Destination{Host: d.host.value, Port: uint16(d.port.value), Address: d.address.value}
	if !d.port.given() {
		m.Port = d.address.value.Port()
	}
	return m
}

// rule mirrors one of a service.
type rule struct {
	at      place
	who     item[string]
	hosts   item[[]item[string]]
	methods item[[]item[string]]
	path    item[string]
	headers []header
	to      item[[]item[string]]
	chain   item[string]
	whole   bool // all of it could be read
}

type header struct{ name, value string }

// identityKinds are in the order of the page.
var identityKinds = []model.IdentityKind{model.IdentitySPIFFE, model.IdentityEmail, model.IdentityDNS, model.IdentityURI}

func readClients(c cursor) clients {
	cl := clients{at: c.at, kinds: map[model.IdentityKind]item[string]{}}
	c.fields(
		field{"name", true, into(&cl.name, name)},
		field{"ca", true, into(&cl.ca, fileName)},
		field{"identity", true, func(c cursor) {
			cl.identity = c.at
			what := map[model.IdentityKind]string{
				model.IdentitySPIFFE: "trust domain, such as staff.example",
				model.IdentityEmail:  "domain of mail addresses, such as example.org",
				model.IdentityDNS:    "domain of hosts, such as example.org",
				model.IdentityURI:    "beginning of URIs up to a slash or colon, such as https://id.example.org/",
			}
			var fields []field
			for _, k := range identityKinds {
				fields = append(fields, field{string(k), false, func(c cursor) {
					cl.kinds[k] = c.checked(what[k], func(s string) error { return model.CheckWithin(k, s) })
				}})
			}
			before := len(c.r.problems)
			c.fields(fields...)
			if c.r.outline == nil && len(cl.kinds) != 1 && len(c.r.problems) == before {
				c.r.problemf(c.at, "has %d kinds of identity; expect one, as in {spiffe: staff.example}", len(cl.kinds))
			}
		}},
		field{"revocation", true, func(c cursor) {
			cl.revoked = c.at
			before := len(c.r.problems)
			c.fields(
				field{"crl", false, into(&cl.crl, fileName)},
				field{"ocsp", false, into(&cl.ocsp, cursor.boolean)},
				field{"responder", false, into(&cl.responder, func(c cursor) item[string] {
					return c.checked("URL of a responder, such as http://ocsp.example.org:8080/", model.CheckResponder)
				})},
				field{"older-than", false, into(&cl.olderThan, func(c cursor) item[time.Duration] {
					return c.duration(model.OlderThanMin, model.OlderThanMax)
				})},
				field{"lifetime", false, into(&cl.lifetime, func(c cursor) item[time.Duration] {
					return c.duration(model.ClientLifetimeMin, model.ClientLifetimeMax)
				})},
			)
			switch {
			case c.r.outline != nil || len(c.r.problems) > before:
			case cl.responder.given() && !cl.ocsp.value:
				c.r.problemf(cl.responder.at, "responder is of OCSP, and nobody is asked; say ocsp: true")
			case !cl.crl.given() && !cl.ocsp.value && cl.olderThan.given():
				c.r.problemf(cl.olderThan.at, "older-than is of a list of revoked certificates or of responders, and there is neither; give crl, or say ocsp: true")
			case cl.crl.given() && !cl.olderThan.given():
				c.r.problemf(cl.crl.at, "says not how old the list may be; give older-than, as in {crl: staff.crl, older-than: 24h}")
			case !cl.crl.given() && !cl.ocsp.value && !cl.lifetime.given():
				c.r.problemf(c.at, "nothing ends what a stolen key may do; expect {crl: FILE, older-than: TIME}, {ocsp: true}, or {lifetime: TIME} for short-lived certificates alone")
			}
		}},
	)
	return cl
}

func readService(c cursor) service {
	s := service{at: c.at}
	c.fields(
		field{"name", true, into(&s.name, name)},
		field{"hosts", true, list(&s.hosts, hostName)},
		field{"gateway", true, func(c cursor) {
			c.fields(
				field{"nodes", true, list(&s.nodes, nameOf("node"))},
				field{"address", true, into(&s.address, serviceAddress)},
				field{"mode", false, into(&s.mode, readGatewayMode)},
			)
		}},
		field{"certificate", true, func(c cursor) {
			before := len(c.r.problems)
			c.fields(
				field{"file", true, into(&s.certificate, fileName)},
				field{"key", false, into(&s.key, fileName)},
				field{"signer", false, into(&s.signer, func(c cursor) item[string] {
					return c.checked("path of a unix socket on the gateway's node, such as /run/shop-signer.sock", model.CheckSocket)
				})},
			)
			switch {
			case c.r.outline != nil || len(c.r.problems) > before:
			case s.key.given() && s.signer.given():
				c.r.problemf(s.signer.at, "key and signer are two places of one key; leave one out")
			case !s.key.given() && !s.signer.given():
				c.r.problemf(c.at, "\"key\" is missing; expect the file of the key, or signer: the socket of the process that has it")
			}
		}},
		field{"clients", true, into(&s.clients, nameOf("clients entry"))},
		field{"client-headers", false, func(c cursor) {
			s.headers = c.at
			headerName := func(c cursor) item[string] {
				return c.checked("name of a header, such as X-Client-Identity", model.CheckHeaderName)
			}
			c.fields(
				field{"certificate", false, into(&s.headerNames[0], headerName)},
				field{"pem", false, into(&s.headerNames[1], headerName)},
				field{"identity", false, into(&s.headerNames[2], headerName)},
				field{"serial", false, into(&s.headerNames[3], headerName)},
			)
		}},
		field{"origin", false, func(c cursor) {
			s.from = c.at
			c.fields(
				field{"address", true, into(&s.origin, serviceAddress)},
				field{"tls", true, func(c cursor) {
					c.fields(
						field{"ca", true, into(&s.originCA, fileName)},
						field{"name", true, into(&s.originName, hostName)},
					)
				}},
			)
		}},
		field{"rules", true, list(&s.rules, readRule)},
		field{"destinations", false, list(&s.destinations, readDestination)},
		field{"protocol", false, into(&s.protocol, readServiceProtocol)},
		field{"alpn", false, list(&s.alpn, func(c cursor) item[string] {
			return c.checked("name of a protocol, as ALPN has it", model.CheckALPN)
		})},
		field{"idle", false, into(&s.idle, func(c cursor) item[time.Duration] {
			return c.duration(model.OpaqueIdleMin, model.OpaqueIdleMax)
		})},
	)
	return s
}

func readDestination(c cursor) destination {
	d := destination{at: c.at}
	c.fields(
		field{"host", true, into(&d.host, hostName)},
		field{"port", false, into(&d.port, func(c cursor) item[int] { return c.integer(1, 1<<16-1) })},
		field{"address", true, into(&d.address, serviceAddress)},
	)
	return d
}

// gatewayMode is the service's.
func (s *service) gatewayMode() model.GatewayMode {
	if s.mode.value == model.ModeTransparent.String() {
		return model.ModeTransparent
	}
	return model.GatewayMode(s.mode.value)
}

// connects reports whether the service is a proxy.
func (s *service) connects() bool { return s.gatewayMode() == model.ModeConnect }

// destinationModels are those that could be read.
func (s *service) destinationModels() (out []model.Destination) {
	for _, d := range s.destinations.value {
		if d.ok() {
			out = append(out, d.model())
		}
	}
	return out
}

// checkDestinations holds that a proxy has destinations, and any other service an origin.
func (c *checker) checkDestinations(s *service) {
	if !s.connects() {
		if s.destinations.given() {
			c.problemf(s.destinations.at, "destinations are what clients of a proxy may ask for; say mode: connect in gateway, or give the service an origin")
		} else if s.from == (place{}) {
			c.problemf(s.at, "%q is missing; it is required here", "origin")
		}
		return
	}
	if s.from != (place{}) {
		c.problemf(s.from, "a proxy (mode: connect) has no origin: its clients name destinations; give destinations in its place")
	}
	if n := len(s.destinations.value); !s.destinations.given() {
		c.problemf(s.at, "%q is missing; a proxy (mode: connect) lets its clients ask for nothing else", "destinations")
	} else if s.destinations.ok && (n == 0 || n > model.DestinationsMax) {
		c.problemf(s.destinations.at, "%d destinations; a proxy has 1 to %d", n, model.DestinationsMax)
	}
	for _, f := range []struct {
		name string
		at   place
	}{{"protocol", s.protocol.at}, {"alpn", s.alpn.at}} {
		if f.at != (place{}) {
			c.problemf(f.at, "%s is not for a proxy (mode: connect), which does not read what it carries; leave it out", f.name)
		}
	}
	seen := map[string]int{}
	for _, d := range s.destinations.value {
		if !d.ok() {
			continue
		}
		m := d.model()
		if line, twice := seen[m.Name()]; twice {
			c.problemf(d.at, "%s is given already, in line %d", m.Name(), line)
		}
		seen[m.Name()] = d.at.line
		if c.file.block.ok && c.file.block.value.Contains(m.Address.Addr()) {
			c.problemf(d.address.at, "%s is within the SID block %s, where nothing from outside may go", m.Address, c.file.block.value)
		}
		if s.address.ok && s.address.value.Addr().Is4() != m.Address.Addr().Is4() {
			c.problemf(d.address.at, "%s is of another version of IP than %s, where clients connect to, and the destination sees the client's address; give both of one version", m.Address, s.address.value)
		}
	}
}

// origins are where connections of a rule go, and places to speak of them.
func (s *service) leads(r *rule) (to []netip.AddrPort) {
	if s.connects() {
		return model.Service{Mode: model.ModeConnect, Destinations: s.destinationModels()}.Leads(model.ServiceRule{To: values(r.to.value)})
	}
	if !s.origin.ok {
		return nil
	}
	return []netip.AddrPort{s.origin.value}
}

// Protocols of services.
const (
	serviceHTTP = "http"
	serviceTLS  = "tls"
)

func readServiceProtocol(c cursor) item[string] {
	return c.checked("http or tls", func(s string) error {
		if s != serviceHTTP && s != serviceTLS {
			return errors.New("is not a protocol of services; expect http, whose requests the rules look at, or tls, for any other inside of TLS")
		}
		return nil
	})
}

// opaque is how bytes of the service go on.
func (s *service) opaque() model.Opaque {
	if s.protocol.value != serviceTLS && !s.connects() {
		return model.Opaque{}
	}
	o := model.Opaque{On: true, ALPN: values(s.alpn.value), Idle: model.OpaqueIdle}
	if s.idle.ok {
		o.Idle = s.idle.value
	}
	return o
}

// clientHeaders are those by which the origin hears who a client is.
func (s *service) clientHeaders() model.ClientHeaders {
	switch {
	case s.opaque().On:
		return model.ClientHeaders{}
	case s.headers == place{}:
		return model.StandardHeaders()
	}
	n := s.headerNames
	return model.ClientHeaders{Certificate: n[0].value, PEM: n[1].value, Identity: n[2].value, Serial: n[3].value}
}

// checkClientHeaders holds that they are of a service of HTTP, and different.
func (c *checker) checkClientHeaders(s *service) {
	if s.headers == (place{}) {
		return
	}
	if s.opaque().On {
		c.problemf(s.headers, "client-headers are for services of HTTP; this one carries what it does not read")
		return
	}
	given := 0
	for i, n := range s.headerNames {
		if n.given() {
			given++
		}
		if n.ok && slices.ContainsFunc(s.headerNames[:i], func(o item[string]) bool { return o.ok && strings.EqualFold(o.value, n.value) }) {
			c.problemf(n.at, "%q is given twice", n.value)
		}
	}
	if given == 0 {
		c.problemf(s.headers, "no names; expect one at least, as in {identity: X-Client-Identity}, or leave client-headers out for Client-Cert")
	}
}

// checkOpaque holds that settings of connections are those of a service whose bytes are not read.
func (c *checker) checkOpaque(s *service) {
	if s.connects() {
		return
	}
	if s.protocol.value != serviceTLS {
		for _, f := range []struct {
			name string
			at   place
		}{{"alpn", s.alpn.at}, {"idle", s.idle.at}} {
			if f.at != (place{}) {
				c.problemf(f.at, "%s is for services with protocol: tls; this one has HTTP", f.name)
			}
		}
		return
	}
	if n := len(s.alpn.value); n > model.ALPNMax || s.alpn.ok && n == 0 {
		c.problemf(s.alpn.at, "%d protocols; expect 1 to %d, or leave alpn out", n, model.ALPNMax)
	}
	for i, a := range s.alpn.value {
		if a.ok && slices.ContainsFunc(s.alpn.value[:i], func(b item[string]) bool { return b.value == a.value }) {
			c.problemf(a.at, "%q is given twice", a.value)
		}
	}
}

func readRule(c cursor) rule {
	r := rule{at: c.at}
	before := len(c.r.problems)
	text := func(what string) func(cursor) item[string] {
		return func(c cursor) item[string] { c.takes("%s", what); return c.text() }
	}
	c.fields(
		field{"who", true, into(&r.who, text("`**` for everybody, or a pattern of identities: `spiffe://staff.example/ops/*`, `*@example.org`, `*.example.org`"))},
		field{"hosts", false, list(&r.hosts, hostName)},
		field{"methods", false, list(&r.methods, readMethod)},
		field{"path", false, into(&r.path, text("pattern of paths, such as /status, /a/*/c or /files/**"))},
		field{"headers", false, func(c cursor) {
			if c.takes("mapping of names of headers to values, as in {X-Version: beta}") {
				return
			}
			c.entries(func(name string, c cursor) { r.headers = append(r.headers, header{name, c.text().value}) })
		}},
		field{"to", false, list(&r.to, func(c cursor) item[string] {
			c.takes("name of a destination, with its port, as in git.example.org:22")
			return c.text()
		})},
		field{"chain", true, into(&r.chain, nameOf("chain"))},
	)
	r.whole = len(c.r.problems) == before
	return r
}

func readMethod(c cursor) item[string] {
	if c.takes("method of HTTP, in capital letters") {
		return item[string]{}
	}
	t := c.text()
	if err := policy.CheckMethod(t.value); t.ok && err != nil {
		c.r.problemf(c.at, "%v", err)
		t.ok = false
	}
	return t
}

func fileName(c cursor) item[string] {
	return c.checked("name of a file on the gateway's node, from the root or from the folder that its agent takes files of gateways from", model.CheckFile)
}

func hostName(c cursor) item[string] {
	return c.checked("name of a host, such as shop.example.org", model.CheckHost)
}

func serviceAddress(c cursor) item[netip.AddrPort] {
	if c.takes("address and port, such as `[2001:db8::1]:443` or `192.0.2.1:443`") {
		return item[netip.AddrPort]{}
	}
	return parsed(c, netip.ParseAddrPort, "is not an address with a port, such as [2001:db8::1]:443 or 192.0.2.1:443", model.CheckServiceAddress)
}

func readGatewayMode(c cursor) item[string] {
	return c.checked("transparent, own or connect", func(s string) error {
		switch s {
		case model.ModeTransparent.String(), string(model.ModeOwn), string(model.ModeConnect):
			return nil
		}
		return errors.New("is not a mode of gateways; expect transparent, own or connect")
	})
}

// checkServices holds the rules for clients and services, and gives the chains that rules name their
// match. It comes before the chains are checked.
func (c *checker) checkServices() {
	c.clients = map[string]*clients{}
	for i := range c.file.clients.value {
		cl := &c.file.clients.value[i]
		claimName(c.reader, c.clients, cl.name, cl, func(cl *clients) place { return cl.name.at })
	}
	for i := range c.file.chains.value {
		if ch := &c.file.chains.value[i]; ch.name.ok {
			if _, twice := c.chains[ch.name.value]; !twice {
				c.chains[ch.name.value] = ch
			}
		}
	}
	names := map[string]*service{}
	used := map[string]bool{}
	for i := range c.file.services.value {
		s := &c.file.services.value[i]
		claimName(c.reader, names, s.name, s, func(s *service) place { return s.name.at })
		used[s.clients.value] = true
		c.checkService(s)
	}
	for name, cl := range c.clients {
		if !used[name] {
			c.warnf(cl.name.at, "%q are clients of no service", name)
		}
	}
	if f := c.functions[model.GatewayName]; f != nil && len(c.file.services.value) > 0 {
		c.problemf(f.name.at, "%q stands for the gateways of services; give the function another name", model.GatewayName)
	}
	c.giveOnward()
}

// leading is where a chain that rules name leads to, and for which service first.
type leading struct {
	service *service
	origin  netip.AddrPort
}

// served is what only one service may have.
type served struct{ node, host string }

func (c *checker) checkService(s *service) {
	if s.hosts.ok && len(s.hosts.value) == 0 {
		c.problemf(s.hosts.at, "no hosts; a service has at least one")
	} else if n := len(s.hosts.value); n > model.HostsMax {
		c.problemf(s.hosts.at, "%d hosts; a service has at most %d", n, model.HostsMax)
	}
	for _, h := range s.hosts.value {
		if !h.ok || len(s.nodes.value) == 0 || !s.nodes.value[0].ok {
			continue
		}
		k := served{s.nodes.value[0].value, h.value}
		switch other := c.served[k]; {
		case other == s:
			c.problemf(h.at, "%q is given twice", h.value)
		case other != nil:
			c.problemf(h.at, "%q is a host of service %s already, in line %d, by the gateway on %s too; a request could be for either", h.value, other.name.value, other.at.line, k.node)
		default:
			c.served[k] = s
		}
	}
	var node *node
	switch {
	case s.nodes.ok && len(s.nodes.value) == 0:
		c.problemf(s.nodes.at, "no node; a service has one gateway")
	case len(s.nodes.value) > 1:
		c.problemf(s.nodes.value[1].at, "a second node; several gateways of one service are not there yet: expect one node")
	case s.nodes.ok:
		if node = resolve(c.reader, s.nodes.value[0], c.nodes, "node"); node != nil && !node.has(model.RoleEdge) {
			c.problemf(s.nodes.value[0].at, "%q has no interface with role edge; clients could not come in", node.name.value)
		}
	}
	for _, a := range []item[netip.AddrPort]{s.address, s.origin} {
		if a.ok && c.file.block.ok && c.file.block.value.Contains(a.value.Addr()) {
			c.problemf(a.at, "%s is within the SID block %s, where nothing from outside may go", a.value, c.file.block.value)
		}
	}
	if s.address.ok && s.origin.ok && s.address.value.Addr().Is4() != s.origin.value.Addr().Is4() {
		c.problemf(s.origin.at, "%s is of another version of IP than %s, where clients connect to, and the origin sees the client's address; give both of one version", s.origin.value, s.address.value)
	}
	c.checkOpaque(s)
	c.checkClientHeaders(s)
	c.checkDestinations(s)
	cl := resolve(c.reader, s.clients, c.clients, "clients entry")
	c.checkServiceRules(s, cl)
}

// checkServiceRules holds that each rule can be read, is reached, and names a chain.
func (c *checker) checkServiceRules(s *service, cl *clients) {
	if s.rules.ok && len(s.rules.value) == 0 {
		c.problemf(s.rules.at, "no rules; without one every request is refused")
	} else if n := len(s.rules.value); n > model.ServiceRulesMax {
		c.problemf(s.rules.at, "%d rules; a service has at most %d", n, model.ServiceRulesMax)
		return
	}
	kind, known := cl.kind()
	known = known && !slices.ContainsFunc(s.hosts.value, func(h item[string]) bool { return !h.ok }) &&
		!slices.ContainsFunc(s.destinations.value, func(d destination) bool { return !d.ok() })
	var rules policy.Rules
	var lines []int // of rules
	for i := range s.rules.value {
		r := &s.rules.value[i]
		if ch := resolve(c.reader, r.chain, c.chains, "chain"); ch != nil {
			if ch.named == nil {
				ch.named = r
				if ch.scheme.at == ch.at { // not said
					ch.scheme.value = model.SchemeKeyedFlow
				}
			}
			c.lead(ch, s, r)
		}
		if !known || !r.whole {
			continue
		}
		more, err := rules.Append(r.model(), model.Service{Hosts: values(s.hosts.value), Opaque: s.opaque(), Mode: s.gatewayMode(), Destinations: s.destinationModels(), Headers: s.clientHeaders()}, kind)
		if hidden, ok := errors.AsType[*policy.HiddenError](err); ok {
			c.problemf(r.at, "no request reaches this rule: the one in line %d takes them all before; put this one in front of it, or remove it", lines[hidden.By])
			continue
		}
		if err != nil {
			c.problemf(r.at, "%v", err)
			continue
		}
		rules, lines = more, append(lines, r.at.line)
	}
}

// kind is that of the clients' identities, if it could be read.
func (cl *clients) kind() (model.IdentityKind, bool) {
	if cl == nil || len(cl.kinds) != 1 {
		return "", false
	}
	for k := range maps.Keys(cl.kinds) {
		return k, true
	}
	return "", false
}

// lead enters where a chain that a rule names leads to.
func (c *checker) lead(ch *chain, s *service, r *rule) {
	all := s.leads(r)
	if len(all) == 0 {
		return // reported
	}
	if len(all) > 1 {
		c.problemf(r.to.at, "the rule leads to %s and %s by one chain, and a chain leads to one address; make a rule and a chain for each", all[0], all[1])
		return
	}
	origin := all[0]
	to, led := c.leads[ch]
	switch {
	case !led:
		c.leads[ch] = leading{s, origin}
	case to.origin != origin:
		c.problemf(r.chain.at, "%q leads to %s, for service %s (line %d), and this rule leads to %s; make another chain for it",
			ch.name.value, to.origin, to.service.name.value, to.service.at.line, origin)
	case len(to.service.nodes.value) == 1 && len(s.nodes.value) == 1 && to.service.nodes.value[0].value != s.nodes.value[0].value:
		c.problemf(r.chain.at, "%q begins at the gateway of service %s (line %d), on another node; make another chain for this service",
			ch.name.value, to.service.name.value, to.service.at.line)
	}
	if s.connects() && ch.seal.value {
		c.problemf(r.chain.at, "%q is a chain %v", ch.name.value, model.ErrSealOfProxy)
	}
}

// giveOnward gives chains that rules name the match that the plan has for them.
func (c *checker) giveOnward() {
	to := map[netip.AddrPort][]string{}
	first := map[netip.AddrPort]*service{}
	for i := range c.file.chains.value {
		ch := &c.file.chains.value[i]
		if l, ok := c.leads[ch]; ok {
			to[l.origin] = append(to[l.origin], ch.name.value)
			if first[l.origin] == nil {
				first[l.origin] = l.service
			}
		}
	}
	for origin, names := range to {
		if len(names) > model.OnwardChainsMax {
			c.problemf(first[origin].rules.at, "rules name %d chains to %s; each has ports of its own, which are enough for %d", len(names), origin, model.OnwardChainsMax)
			continue
		}
		for name, o := range model.OnwardTo(origin, names) {
			c.chains[name].onward = &o
		}
	}
}

// checkOnward holds what a chain that rules name must be like. whole: its functions are known.
// It tells whether the match is what it should be.
func (c *checker) checkOnward(ch *chain, whole bool) bool {
	switch {
	case ch.named == nil && ch.match == (place{}) && !ch.name.given():
		return false // reported
	case ch.named == nil && ch.match == (place{}):
		c.problemf(ch.at, "%q is missing; it says which packets the chain takes, unless a rule of a service names the chain", "match")
		return false
	case ch.named == nil:
		m := ch.model()
		if !whole {
			m.Functions = nil
		}
		problems := m.CheckSeal(c.function)
		for _, p := range problems {
			c.problemf(ch.placeOf(p), "%s", p.Err)
		}
		return len(problems) == 0
	case ch.match != (place{}):
		c.problemf(ch.match, "the rule in line %d names this chain, which then takes the connections of its gateway and nothing else; remove the match, or make another chain for the rule", ch.named.at.line)
		return false
	}
	s := c.leads[ch].service
	if s == nil || len(s.nodes.value) != 1 || !s.nodes.value[0].ok {
		return false // reported
	}
	m := ch.model()
	if !whole {
		m.Functions = nil
	}
	m.Guard = ch.guard.value
	problems := m.CheckOnward(s.nodes.value[0].value, c.function)
	for _, p := range problems {
		where := ch.placeOf(p)
		message := p.Err.Error()
		switch {
		case p.Field == "ingress" && len(ch.ingress.value) == 0:
			continue // reported
		case p.Field == "direction" && ch.both.at == ch.at: // not said
			message = fmt.Sprintf("\"direction\" is missing: the rule in line %d names this chain, and answers take the same chain as requests; say direction: both", ch.named.at.line)
		}
		c.problemf(where, "%s", message)
	}
	return len(problems) == 0
}

// function is one that is there, as far as chains ask.
func (c *checker) function(name string) model.Function {
	f := c.functions[name]
	return model.Function{Kind: f.modelKind(), Proxy: f.proxy(), Intrusive: f.intrusive.value, Stream: f.streamModel()}
}

// placeOf is where the file says what a problem is about.
func (ch *chain) placeOf(p model.OnwardProblem) place {
	if p.Field == "functions" {
		return ch.functions.value[p.Index].at
	}
	return map[string]place{
		"ingress": ch.ingress.at, "direction": ch.both.at, "own-traffic": ch.own.at,
		"scheme": ch.scheme.at, "on-violation": ch.onViolation.at, "guard": ch.guard.at, "seal": ch.seal.at,
	}[p.Field]
}

func (r *rule) model() model.ServiceRule {
	m := model.ServiceRule{
		Who: r.who.value, Hosts: values(r.hosts.value), Methods: values(r.methods.value), Path: r.path.value, To: values(r.to.value), Chain: r.chain.value,
	}
	for _, h := range r.headers {
		m.Headers = append(m.Headers, model.ServiceHeader{Name: h.name, Value: h.value})
	}
	return m
}

func (p place) source(file string) model.Source {
	return model.Source{File: file, Line: p.line, Column: p.column}
}

// gatewayModels are the clients and services of the file.
func (f *file) gatewayModels(name string) (cl []model.Clients, services []model.Service) {
	for _, c := range f.clients.value {
		kind, _ := c.kind()
		olderThan := c.olderThan.value
		if c.ocsp.value && !c.olderThan.given() {
			olderThan = model.AnswerOlderThan
		}
		cl = append(cl, model.Clients{
			Name: c.name.value, CA: c.ca.value, Kind: kind, Within: c.kinds[kind].value,
			CRL: c.crl.value, OCSP: c.ocsp.value, Responder: c.responder.value, OlderThan: olderThan, Lifetime: c.lifetime.value,
			At: c.ca.at.source(name), CRLAt: c.crl.at.source(name),
		})
	}
	for _, s := range f.services.value {
		m := model.Service{
			Name: s.name.value, Hosts: values(s.hosts.value), Nodes: values(s.nodes.value), Address: s.address.value,
			Certificate: s.certificate.value, Key: s.key.value, Signer: s.signer.value, Clients: s.clients.value,
			Origin: model.Origin{Address: s.origin.value, CA: s.originCA.value, Name: s.originName.value, CAAt: s.originCA.at.source(name)},
			Opaque: s.opaque(), Mode: s.gatewayMode(), Destinations: s.destinationModels(), Headers: s.clientHeaders(),
			At: s.at.source(name), CertificateAt: s.certificate.at.source(name), KeyAt: s.key.at.source(name),
		}
		for i := range s.rules.value {
			m.Rules = append(m.Rules, s.rules.value[i].model())
		}
		services = append(services, m)
	}
	return cl, services
}
