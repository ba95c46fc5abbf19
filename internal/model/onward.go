package model

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"path"
	"slices"
	"strings"
)

// GatewayName is the begin of chains in rules of services, and the end of their reverse
// direction. It is used as a function's name; no function of such a domain has it.
const GatewayName = "gateway"

// Onward selects the connections of a chain in rules of services: connections of its gateway to
// one origin, from ports of the chain. The ports identify the chain of a connection's answers,
// and the proof that the egress requires of a packet.
type Onward struct {
	Origin netip.AddrPort
	Ports  Ports // that connections come from
	// Rest: the guard at the egress also requires this chain if the source port belongs to no
	// chain.
	Rest bool
}

// Ports of connections onward.
const (
	OnwardChainsMax = 16                                    // to one origin
	OnwardPorts     = (1<<16 - onwardLow) / OnwardChainsMax // of one chain
	onwardLow       = 1024
)

// Priorities of the matches of such chains. No other match with one of them takes their packets.
const (
	onwardPriority     = 1
	onwardPriorityRest = 2
)

const protocolTCP Protocol = 6

// Match is the chain's, in its forward direction.
func (o Onward) Match() Match {
	m := NewMatch(netip.PrefixFrom(o.Origin.Addr(), o.Origin.Addr().BitLen()), netip.Prefix{})
	m.Protocol, m.DestinationPort = protocolTCP, Ports{o.Origin.Port(), o.Origin.Port()}
	if o.Rest {
		m.Priority = onwardPriorityRest
		return m
	}
	m.Priority, m.SourcePort = onwardPriority, o.Ports
	return m
}

// OnwardTo assigns ports to the chains to one origin, at most OnwardChainsMax, each named once.
// A chain keeps its ports while others are added or removed, unless hashes of names collide:
// each chain has the first free range from its name's FNV-1a hash on, in the order of the names.
func OnwardTo(origin netip.AddrPort, chains []string) map[string]Onward {
	chains = slices.Sorted(slices.Values(chains))
	out := make(map[string]Onward, len(chains))
	var taken [OnwardChainsMax]string
	for _, c := range chains {
		h := fnv.New32a()
		_, _ = h.Write([]byte(c)) // cannot fail
		for i := range taken {
			i = (int(h.Sum32()%OnwardChainsMax) + i) % OnwardChainsMax
			if taken[i] != "" {
				continue
			}
			taken[i] = c
			first := onwardLow + i*OnwardPorts
			out[c] = Onward{Origin: origin, Ports: Ports{uint16(first), uint16(first + OnwardPorts - 1)}}
			break
		}
	}
	for _, c := range taken {
		if o, ok := out[c]; ok {
			o.Rest = true
			out[c] = o
			break
		}
	}
	return out
}

// ErrSealOfProxy is that a chain of a proxy is sealed.
var ErrSealOfProxy = errors.New("which is sealed: what clients send through a proxy is theirs, and no function can read it; leave seal out")

// OnwardProblem is a setting that a chain in rules of services cannot have.
type OnwardProblem struct {
	Field string // of the chain, as the domain file names it
	Index int    // in its functions
	Err   error
}

// CheckOnward finds settings that a chain in rules of services cannot have. node is the
// gateway's.
func (c Chain) CheckOnward(node string, function func(name string) Function) (list []OnwardProblem) {
	add := func(field string, i int, format string, args ...any) {
		list = append(list, OnwardProblem{field, i, fmt.Errorf(format, args...)})
	}
	if len(c.Ingress) != 1 || c.Ingress[0] != node {
		add("ingress", 0, "is not the gateway's node alone; a chain that a rule names begins at its gateway: expect [%s]", node)
	}
	if !c.Both {
		add("direction", 0, "is forward, and answers take the same chain as requests; say direction: both")
	}
	if c.OwnTraffic {
		add("own-traffic", 0, "is for packets that the node originates; a chain that a rule names takes only the gateway's connections: leave it out")
	}
	switch {
	case !c.Proof.Scheme.Keyed():
		add("scheme", 0, "%s resists no adversary, and a service relies on the proof; expect %s", c.Proof.Scheme, SchemeKeyedFlow)
	case c.Proof.Scheme != SchemeKeyedFlow:
		add("scheme", 0, "%s does not bind a proof to its packet: an attacker on the way could hold a packet back and send another one with its proof to the service; expect %s", c.Proof.Scheme, SchemeKeyedFlow)
	}
	if c.Proof.OnViolation != OnViolationDrop {
		add("on-violation", 0, "%s forwards packets with a wrong proof to the service; leave it out", c.Proof.OnViolation)
	}
	if c.Guard != GuardUnset && c.Guard != GuardEnforce {
		add("guard", 0, "%s lets packets on to the service that have no proof; leave it out", c.Guard)
	}
	list = append(list, c.CheckSeal(function)...)
	for i, name := range c.Functions {
		switch f := function(name); {
		case f.Kind == KindStream && !c.Seal:
			add("functions", i, "%q is of kind stream, and would receive data that is sealed for the origin; set seal: true, so that intrusive functions have sessions of their own with the ends before and behind them", name)
		case f.Proxy.Local:
			add("functions", i, "%q is in the node's own kernel, where packets are recognised only by prefixes, and a gateway's connections differ only by their ports; %s", name, elsewhere(f.Kind))
		case f.Proxy.Rewrites:
			add("functions", i, "%q changes addresses or ports, by which answers find the chain of a gateway's connection; leave it out", name)
		}
	}
	return list
}

func elsewhere(k Kind) string {
	if k == KindNetfilter {
		return "give the function a namespace (own)"
	}
	return "put the function behind interfaces"
}

// gatewayOf is the node of the gateway that rules name a chain at; "": none does.
func (d Domain) gatewayOf(chain string) string {
	for _, s := range d.Services {
		if slices.ContainsFunc(s.Rules, func(r ServiceRule) bool { return r.Chain == chain }) && len(s.Nodes) > 0 {
			return s.Nodes[0]
		}
	}
	return ""
}

// CheckServices holds what the services of a domain, whose parts each keep their own rules, must
// keep together with its chains.
func (d Domain) CheckServices() error {
	var errs []error
	functions := make(map[string]*Function, len(d.Functions))
	for i := range d.Functions {
		if f := &d.Functions[i]; functions[f.Name] == nil {
			functions[f.Name] = f
		}
	}
	function := func(name string) (f Function) {
		if at := functions[name]; at != nil {
			f = *at
		}
		return f
	}
	for _, c := range d.Chains {
		node := d.gatewayOf(c.Name)
		if c.Onward == nil {
			for _, p := range c.CheckSeal(function) {
				errs = append(errs, fmt.Errorf("chain %s: %s: %w", c.Name, p.Field, p.Err))
			}
		}
		switch {
		case (node == "") != (c.Onward == nil):
			errs = append(errs, fmt.Errorf("chain %s: it takes a gateway's connections if and only if a rule of a service names it", c.Name))
		case c.Onward != nil:
			for _, p := range c.CheckOnward(node, function) {
				errs = append(errs, fmt.Errorf("chain %s: %s: %w", c.Name, p.Field, p.Err))
			}
			if c.Match != c.Onward.Match() {
				errs = append(errs, fmt.Errorf("chain %s: has a match of its own, and a rule of a service names it", c.Name))
			}
		}
	}
	for _, s := range d.Services {
		for _, r := range s.Rules {
			c, ok := find(d.Chains, func(c Chain) bool { return c.Name == r.Chain })
			if !ok {
				errs = append(errs, fmt.Errorf("service %s: a rule names chain %s, which is not there", s.Name, r.Chain))
			} else if to := s.Leads(r); c.Onward != nil && (len(to) != 1 || c.Onward.Origin != to[0]) {
				errs = append(errs, fmt.Errorf("service %s: a rule names chain %s, which leads to %s", s.Name, r.Chain, c.Onward.Origin))
			} else if s.Mode == ModeConnect && c.Seal {
				errs = append(errs, fmt.Errorf("service %s: a rule names chain %s, %w", s.Name, r.Chain, ErrSealOfProxy))
			}
		}
	}
	if _, taken := d.Function(GatewayName); taken && len(d.Services) > 0 {
		errs = append(errs, fmt.Errorf("function %s: the name stands for gateways; give the function another", GatewayName))
	}
	return errors.Join(errs...)
}

// Check holds what clients must keep by themselves. Its errors start with the name of the setting
// that breaks a rule.
func (c Clients) Check() error {
	if err := CheckName(c.Name); err != nil {
		return fmt.Errorf("name: %q %w", c.Name, err)
	}
	if err := CheckFile(c.CA); err != nil {
		return fmt.Errorf("ca: %q %w", c.CA, err)
	}
	if err := new(IdentityKind).UnmarshalText([]byte(c.Kind)); err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	if err := CheckWithin(c.Kind, c.Within); err != nil {
		return fmt.Errorf("identity: %q %w", c.Within, err)
	}
	switch {
	case c.CRL == "" && c.Lifetime == 0 && !c.OCSP:
		return errors.New("revocation: a stolen key would stay valid; give a list of revoked certificates (crl), have responders asked (ocsp), or limit their lifetime")
	case (c.CRL != "" || c.OCSP) && (c.OlderThan < OlderThanMin || c.OlderThan > OlderThanMax):
		return fmt.Errorf("revocation: older-than %s is not from %s to %s", c.OlderThan, OlderThanMin, OlderThanMax)
	case c.CRL == "" && !c.OCSP && c.OlderThan != 0:
		return errors.New("revocation: older-than needs a list (crl) or responders (ocsp), and there is neither")
	case c.Responder != "" && !c.OCSP:
		return errors.New("revocation: responder needs ocsp, and nobody is asked")
	case c.Lifetime != 0 && (c.Lifetime < ClientLifetimeMin || c.Lifetime > ClientLifetimeMax):
		return fmt.Errorf("revocation: lifetime %s is not from %s to %s", c.Lifetime, ClientLifetimeMin, ClientLifetimeMax)
	}
	if c.Responder != "" {
		if err := CheckResponder(c.Responder); err != nil {
			return fmt.Errorf("revocation: responder %q %w", c.Responder, err)
		}
	}
	if c.CRL != "" {
		if err := CheckFile(c.CRL); err != nil {
			return fmt.Errorf("revocation: crl %q %w", c.CRL, err)
		}
	}
	return nil
}

// Check holds what a service must keep by itself, but for its rules, which are
// internal/gateway/policy's. Its errors start with the name of the setting that breaks a rule.
func (s Service) Check() error {
	if err := CheckName(s.Name); err != nil {
		return fmt.Errorf("name: %q %w", s.Name, err)
	}
	if len(s.Hosts) == 0 || len(s.Hosts) > HostsMax {
		return fmt.Errorf("hosts: has %d; a service has 1 to %d", len(s.Hosts), HostsMax)
	}
	for i, h := range s.Hosts {
		if err := CheckHost(h); err != nil {
			return fmt.Errorf("hosts: %q %w", h, err)
		}
		if slices.Contains(s.Hosts[:i], h) {
			return fmt.Errorf("hosts: %q is given twice", h)
		}
	}
	if err := CheckServiceAddress(s.Address); err != nil {
		return fmt.Errorf("address: %q %w", s.Address, err)
	}
	if err := CheckFile(s.Certificate); err != nil {
		return fmt.Errorf("certificate: %q %w", s.Certificate, err)
	}
	switch {
	case (s.Key == "") == (s.Signer == ""):
		return errors.New("key: expect a file, or a signer, and not both")
	case s.Key != "":
		if err := CheckFile(s.Key); err != nil {
			return fmt.Errorf("key: %q %w", s.Key, err)
		}
	default:
		if err := CheckSocket(s.Signer); err != nil {
			return fmt.Errorf("signer: %q %w", s.Signer, err)
		}
	}
	if err := s.Opaque.Check(); err != nil {
		return fmt.Errorf("protocol: %w", err)
	}
	if err := s.Headers.Check(); err != nil {
		return fmt.Errorf("client-headers: %w", err)
	}
	if s.Opaque.On && s.Headers != (ClientHeaders{}) {
		return errors.New("client-headers: are for services of HTTP")
	}
	if err := s.checkDestinations(); err != nil {
		return err
	}
	if s.Mode != ModeConnect {
		if err := CheckServiceAddress(s.Origin.Address); err != nil {
			return fmt.Errorf("origin: %q %w", s.Origin.Address, err)
		}
		if err := CheckFile(s.Origin.CA); err != nil {
			return fmt.Errorf("origin: ca: %q %w", s.Origin.CA, err)
		}
		if err := CheckHost(s.Origin.Name); err != nil {
			return fmt.Errorf("origin: name %q %w", s.Origin.Name, err)
		}
	}
	switch {
	case s.Mode != ModeTransparent && s.Mode != ModeOwn && s.Mode != ModeConnect:
		return fmt.Errorf("mode: %q is none", s.Mode)
	case s.Mode != ModeConnect && s.Address.Addr().Is4() != s.Origin.Address.Addr().Is4():
		return fmt.Errorf("origin: %s is of another version of IP than %s, and the origin sees the client's address; give both of one version", s.Origin.Address, s.Address)
	case len(s.Nodes) != 1:
		return fmt.Errorf("nodes: has %d; a service has one gateway yet", len(s.Nodes))
	case len(s.Rules) == 0 || len(s.Rules) > ServiceRulesMax:
		return fmt.Errorf("rules: has %d; a service has 1 to %d", len(s.Rules), ServiceRulesMax)
	}
	return nil
}

// CheckServiceAddress holds the rule for the address of a service or an origin.
func CheckServiceAddress(a netip.AddrPort) error {
	switch {
	case !a.IsValid() || a.Port() == 0:
		return errors.New("is not an address with a port, such as [2001:db8::1]:443 or 192.0.2.1:443")
	case a.Addr().Zone() != "", a.Addr().Is4In6(), !a.Addr().IsGlobalUnicast():
		return errors.New("is not a unicast address that others can reach")
	}
	return CheckMatchPrefix(netip.Prefix{}, netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
}

// CheckKeyFile holds the rule for names of files with keys of functions: a path from the root.
func CheckKeyFile(s string) error {
	if s == "" {
		return errors.New("is missing; give the file on the function's node that has the key, as openssl rand -base64 32 writes it")
	}
	if !path.IsAbs(s) || path.Clean(s) != s {
		return fmt.Errorf("%q is not a path from the root without dots and double slashes, as /etc/waystamp/seal-7.key", s)
	}
	return CheckFile(s)
}

// CheckSocket holds the rule for names of unix sockets on a gateway's node.
func CheckSocket(s string) error {
	const most = 107 // that the kernel takes
	switch err := CheckFile(s); {
	case err != nil:
		return err
	case !path.IsAbs(s) || s == "/":
		return errors.New("is not a path from the root, such as /run/shop-signer.sock")
	case len(s) > most:
		return fmt.Errorf("has %d bytes; the name of a socket has at most %d", len(s), most)
	}
	return nil
}

// CheckFile holds the rule for names of files on a gateway's node: a path from the root, or one
// that stays within the gateway's folder.
func CheckFile(s string) error {
	const most = 256
	switch {
	case s == "":
		return errors.New("is empty; expect the name of a file")
	case len(s) > most:
		return fmt.Errorf("has %d bytes; the name of a file has at most %d", len(s), most)
	case strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c == 0x7f }):
		return errors.New("has a control character")
	case path.Clean(s) != s || s == "." || s == ".." || strings.HasPrefix(s, "../"):
		return errors.New("has dots or slashes that lead elsewhere; expect a path from the root, or one within the gateway's folder")
	}
	return nil
}
