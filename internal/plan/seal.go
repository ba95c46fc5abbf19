package plan

import (
	"cmp"
	"crypto/ed25519"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// SealKey is the secret of one end of a sealed part: an Ed25519 seed (RFC 8032 section 5.1.5).
// It authenticates the end and encrypts nothing itself: sessions have keys of their own. It
// prints as pot.Redacted, and refuses to be marshalled.
type SealKey [ed25519.SeedSize]byte

// SealPublic is the public key of an end (RFC 8032 section 5.1.5).
type SealPublic [ed25519.PublicKeySize]byte

// Public is the public key, which the other end accepts.
func (k SealKey) Public() (p SealPublic) {
	copy(p[:], ed25519.NewKeyFromSeed(k[:])[ed25519.SeedSize:])
	return p
}

func (SealKey) String() string               { return pot.Redacted }
func (SealKey) GoString() string             { return pot.Redacted }
func (SealKey) Format(f fmt.State, _ rune)   { _, _ = io.WriteString(f, pot.Redacted) }
func (SealKey) LogValue() slog.Value         { return slog.StringValue(pot.Redacted) }
func (SealKey) MarshalText() ([]byte, error) { return nil, errSealMarshal }

var errSealMarshal = errors.New("a key of a sealed part is not written by accident: the encoder of a file that holds it must name its fields")

// PathSeal says how the ends of a sealed part identify each other, in one epoch of its path in the chain's
// forward direction: by keys that the planner has made, or by certificates for keys of their own.
// Connections are sealed both ways.
type PathSeal struct {
	From, To SealKey // From dials; zero if Domain is set
	// Domain is the trust domain of the controller that signs the ends' own keys; "": From and To are their keys.
	Domain string
	// FromRevocations and ToRevocations are how often the ends' nodes had been revoked when the epoch was made: ends refuse
	// certificates of each other that were issued before. Only with Domain.
	FromRevocations, ToRevocations uint32
}

// Seal identifies both ends of a sealed part to one of them, in one epoch.
type Seal struct {
	Name    string // of this end: model.SealNameIn
	Key     SealKey
	Peer    string     // name of the other end
	PeerKey SealPublic // the only one that is taken from it
	// Certified: each end has a key of its own and a certificate of the controller for its name. The plan has no keys.
	Certified bool
	// Revocations is how often this end's node was revoked, and PeerRevocations the other end's: a certificate of before counts
	// no more. Only with Certified.
	Revocations, PeerRevocations uint32
	// Origin and Ports identify the chain's connections in each of its parts: their destination,
	// and their source ports.
	Origin netip.AddrPort
	Ports  model.Ports
}

// SealOrigin has the settings with which a chain's last intrusive function opens a session with
// a service's origin.
type SealOrigin struct {
	Service string
	CA      string // a file on the function's node
	Name    string // that the origin's certificate is for
}

// sealed reports whether a part is sealed between two ends of the domain: then the path has the
// keys. The last part is sealed between a function and the origin.
func sealed(ch model.Chain, p Path) bool {
	return ch.Seal && p.Direction == model.Forward && p.To != ""
}

// fresh makes the keys of both ends of a path. With a trust domain the ends make them themselves.
func (s *PathSeal) fresh(random io.Reader, domain string, revocations map[string]uint32, hops []Hop) error {
	if *s = (PathSeal{Domain: domain}); domain != "" {
		s.FromRevocations, s.ToRevocations = revocations[hops[0].Node], revocations[hops[len(hops)-1].Node]
		return nil
	}
	for _, k := range []*SealKey{&s.From, &s.To} {
		if _, err := io.ReadFull(random, k[:]); err != nil {
			return fmt.Errorf("make a key of a sealed part: %w", err)
		}
	}
	return nil
}

// sealEnds are the seals of a path's two ends; nil, nil: the path is not sealed between two ends
// of the domain.
func sealEnds(d model.Domain, p Path) (from, to *Seal) {
	if p.Seal == nil {
		return nil, nil
	}
	o := chainOf(d, p.Chain).Onward
	in := cmp.Or(p.Seal.Domain, model.SealDomain)
	from = &Seal{Name: model.SealNameIn(in, p.Hops[0].Node, p.From), Origin: o.Origin, Ports: o.Ports}
	to = &Seal{Name: model.SealNameIn(in, p.Hops[len(p.Hops)-1].Node, p.To), Origin: o.Origin, Ports: o.Ports}
	from.Peer, to.Peer = to.Name, from.Name
	if p.Seal.Domain != "" {
		from.Certified, to.Certified = true, true
		from.Revocations, from.PeerRevocations = p.Seal.FromRevocations, p.Seal.ToRevocations
		to.Revocations, to.PeerRevocations = p.Seal.ToRevocations, p.Seal.FromRevocations
		return from, to
	}
	from.Key, from.PeerKey = p.Seal.From, p.Seal.To.Public()
	to.Key, to.PeerKey = p.Seal.To, p.Seal.From.Public()
	return from, to
}

// CertifiedEnds are the names of the node's ends that need a certificate of the controller, by function; "gateway" is one.
func (n Node) CertifiedEnds() map[string]string {
	ends := map[string]string{}
	for _, h := range n.Headends {
		if h.Seal != nil && h.Seal.Certified {
			ends[h.From] = h.Seal.Name
		}
	}
	for _, e := range n.Egresses {
		if e.Seal != nil && e.Seal.Certified {
			ends[e.To] = e.Seal.Name
		}
	}
	return ends
}

// EndRevocations is how often the node was revoked, as the latest plan of an end of it says: a certificate for the end that was
// issued before is refused by others.
func (n Node) EndRevocations(name string) (most uint32) {
	for _, h := range n.Headends {
		if h.Seal != nil && h.Seal.Name == name {
			most = max(most, h.Seal.Revocations)
		}
	}
	for _, e := range n.Egresses {
		if e.Seal != nil && e.Seal.Name == name {
			most = max(most, e.Seal.Revocations)
		}
	}
	return most
}

// RevokedPaths are the paths of the node whose connections end when next takes the place of its plan: all paths of a chain with an end
// of before a revocation. Of such a chain a sealed part is gone, or one of its ends has to show a later certificate.
func (n Node) RevokedPaths(next Node) []uint32 {
	type end struct {
		path uint32
		peer string
	}
	numbers := func(n Node) (of map[end]uint32, parts map[uint32]string) {
		of, parts = map[end]uint32{}, map[uint32]string{} // parts: their chains
		add := func(id PathID, s *Seal) {
			if s != nil && s.Certified {
				e := end{id.Path, s.Peer}
				of[e], parts[id.Path] = max(of[e], s.PeerRevocations), id.Chain
			}
		}
		for _, h := range n.Headends {
			add(h.PathID, h.Seal)
		}
		for _, e := range n.Egresses {
			add(e.PathID, e.Seal)
		}
		return of, parts
	}
	was, parts := numbers(n)
	now, left := numbers(next)
	revoked := map[string]bool{}
	for e, number := range was {
		if _, ok := left[e.path]; !ok || now[e] > number {
			revoked[parts[e.path]] = true
		}
	}
	var paths []uint32
	add := func(id PathID) {
		if revoked[id.Chain] && !slices.Contains(paths, id.Path) {
			paths = append(paths, id.Path)
		}
	}
	for _, h := range n.Headends {
		add(h.PathID)
	}
	for _, e := range n.Egresses {
		add(e.PathID)
	}
	slices.Sort(paths)
	return paths
}

// sealOrigins are the origins with which the path's first end opens sessions; none if that end
// is no intrusive function, or is not the last one.
func sealOrigins(d model.Domain, p Path) (out []SealOrigin) {
	if p.Direction != model.Forward || p.From == "" || p.From == model.GatewayName || p.To != "" || len(d.Services) == 0 {
		return nil
	}
	if f, _ := d.Function(p.From); !f.Intrusive {
		return nil
	}
	for _, s := range d.Services {
		for _, r := range s.Rules {
			if r.Chain == p.Chain {
				out = append(out, SealOrigin{s.Name, s.Origin.CA, s.Origin.Name})
				break
			}
		}
	}
	return out
}

func chainOf(d model.Domain, name string) model.Chain {
	for _, c := range d.Chains {
		if c.Name == name {
			return c
		}
	}
	return model.Chain{}
}

// intrusive reports whether a function of the node reads payload.
func (n Node) intrusive(function string) bool {
	for _, x := range n.Proxies {
		if x.Function == function && x.Stream != nil {
			return x.Stream.Intrusive
		}
	}
	return false
}

// attached reports whether a function gets plain connections by interfaces of its own.
func (c *nodeChecker) attached(function string) bool {
	return slices.ContainsFunc(c.node.Proxies, func(x Proxy) bool {
		return x.Function == function && x.Stream != nil && x.Stream.Attached != (model.Attached{})
	})
}

func (n Node) isGateway(function string) bool {
	return function == model.GatewayName && n.Gateway() != nil
}

// sameWay reports whether the paths of two compilations are one path, whose connections continue
// in the next epoch: they have one name, and both are sealed or both are not.
func sameWay(p, q *Path) bool {
	return p.Path == q.Path && (p.Seal == nil) == (q.Seal == nil)
}

// withOrigins adds the origins of other headends: while nodes change one after the other, a
// gateway may change before the last end, or after it.
func withOrigins(heads, others []Headend) []Headend {
	heads = slices.Clone(heads)
	for i, h := range heads {
		if len(h.Origins) == 0 {
			continue
		}
		j := slices.IndexFunc(others, func(o Headend) bool { return o.Path == h.Path })
		if j < 0 {
			continue
		}
		heads[i].Origins = slices.Clone(h.Origins)
		for _, o := range others[j].Origins {
			if !slices.ContainsFunc(h.Origins, func(x SealOrigin) bool { return x.Service == o.Service }) {
				heads[i].Origins = append(heads[i].Origins, o)
			}
		}
	}
	return heads
}

// takesAs is an egress that takes the packets that another epoch of its path does.
func (e Egress) takesAs(o Egress) Egress {
	e.Match, e.Guard = o.Match, o.Guard
	if e.Seal != nil && o.Seal != nil {
		s := *e.Seal
		s.Origin, s.Ports = o.Seal.Origin, o.Seal.Ports
		e.Seal = &s
	}
	return e
}

// sealDials checks the seals of a headend: an end sends nothing unsealed.
func (c *nodeChecker) sealDials(p *problems, h Headend) {
	intrusive := c.node.intrusive(h.From)
	end := h.Direction == model.Forward && (intrusive || c.node.isGateway(h.From))
	switch {
	case end && h.To != "" && h.Seal == nil:
		p.addf("seal: has no key for its end at function %s; an end of a sealed chain sends only sealed data", h.To)
	case h.Seal != nil && !(end && h.To != ""):
		p.addf("seal: only a path from a gateway or an intrusive function to an intrusive function has a key")
	case end && intrusive && h.To == "" && len(h.Origins) == 0:
		p.addf("origins: are missing; the last intrusive function of a chain opens the session with the origin")
	case len(h.Origins) > 0 && !(end && intrusive && h.To == ""):
		p.addf("origins: only a path from the last intrusive function of a chain has them")
	}
	if h.Seal != nil {
		c.seal(p, h.PathID, h.Match, *h.Seal, h.From, h.To)
	}
	services := map[string]bool{}
	for i, o := range h.Origins {
		p.within(fmt.Sprintf("origins[%d]", i), func(p *problems) {
			p.add(model.CheckName(o.Service), "service %q", o.Service)
			if services[o.Service] {
				p.addf("service %q is given twice", o.Service)
			}
			services[o.Service] = true
			p.add(model.CheckFile(o.CA), "ca %q", o.CA)
			p.add(model.CheckHost(o.Name), "name %q", o.Name)
		})
	}
}

// sealTakes checks the seals of an egress: an intrusive function receives nothing unsealed.
func (c *nodeChecker) sealTakes(p *problems, e Egress) {
	part := e.Through != nil && e.Through.Part == e.Path // and not a path from a function on the way
	end := part && e.Direction == model.Forward && c.node.intrusive(e.To)
	switch {
	case end && e.Seal == nil:
		p.addf("seal: has no key; function %s is intrusive, and takes nothing that is not sealed for it", e.To)
	case !end && e.Seal != nil:
		p.addf("seal: only a part that ends at an intrusive function has a key")
	case end:
		if e.Seal.Origin.Port() == model.StreamPlainPort && c.attached(e.To) {
			p.addf("seal: origin %s: function %s gets plain connections to port %d, so the two kinds of connections could not be distinguished", e.Seal.Origin, e.To, model.StreamPlainPort)
		}
		c.seal(p, e.PathID, e.Match, *e.Seal, e.To, e.From)
	case e.Direction == model.Forward && e.Through != nil && c.node.intrusive(e.To):
		// Packets that a function on the way makes belong to the connections of a sealed part.
		if e.Through.Opens {
			p.addf("through: opens connections; to function %s they come from the end before alone", e.To)
		}
		if !slices.ContainsFunc(c.node.Egresses, func(o Egress) bool {
			return o.Path == e.Through.Part && o.To == e.To && o.Chain == e.Chain && o.Direction == e.Direction && o.Seal != nil
		}) {
			p.addf("through: part 0x%08x is no sealed part that ends at function %s", e.Through.Part, e.To)
		}
	}
}

// seal checks one end's seal of a part; own is this end's function, function the other end's.
func (c *nodeChecker) seal(p *problems, id PathID, match model.Match, s Seal, own, function string) {
	p.within("seal", func(p *problems) {
		domain := model.SealDomain
		keys := []SealPublic{s.Key.Public(), s.PeerKey}
		if s.Certified {
			// The controller has checked the names in certificates: names identify ends.
			domain, _, _ = strings.Cut(strings.TrimPrefix(s.Name, "spiffe://"), "/")
			p.add(model.CheckTrustDomain(domain), "name %q: %q", s.Name, domain)
			keys = nil
		}
		name := model.SealNameIn(domain, c.node.Name, own)
		// A holder of a key of a plan may put any name into its certificate: only keys identify ends.
		for _, k := range keys {
			if other, twice := c.sealKeys[k]; twice {
				p.addf("a key is that of %s, too; each end of each part has one of its own in each epoch", other)
			}
			c.sealKeys[k] = fmt.Sprintf("%s in epoch %d", id, id.Epoch)
		}
		o := model.Onward{Origin: s.Origin, Ports: s.Ports}
		if rest := (model.Onward{Origin: s.Origin, Ports: s.Ports, Rest: true}); match != o.Match() && match != rest.Match() {
			p.addf("origin %s and ports %s: differ from the path's match (%s)", s.Origin, s.Ports, match)
		}
		for other, o := range c.sealPorts {
			if other != id.Chain && o.Origin == s.Origin && o.Ports.First <= s.Ports.Last && s.Ports.First <= o.Ports.Last {
				p.addf("ports %s: are those of chain %s, too", s.Ports, other)
			}
		}
		c.sealPorts[id.Chain] = o
		if s.Name != name {
			p.addf("name %q is not that of this end, %s", s.Name, name)
		}
		if node, ok := strings.CutSuffix(s.Peer, "/function/"+function); !ok || s.Peer == s.Name || model.CheckName(strings.TrimPrefix(node, "spiffe://"+domain+"/node/")) != nil {
			p.addf("peer %q is not function %s of another node", s.Peer, function)
		}
		switch {
		case s.Certified:
			if s.Key != (SealKey{}) || s.PeerKey != (SealPublic{}) {
				p.addf("certified: an end with a certificate of the controller makes its key itself; the plan has none")
			}
		case s.Revocations != 0 || s.PeerRevocations != 0:
			p.addf("revocations: only ends with certificates of the controller have them; the plan has keys")
		case s.Key == SealKey{}:
			p.addf("key: is missing")
		case s.PeerKey == SealPublic{}:
			p.addf("peer-key: is missing")
		}
		p.add(model.CheckServiceAddress(s.Origin), "origin %q", s.Origin)
		if s.Ports.First < 1024 || s.Ports.Last < s.Ports.First {
			p.addf("ports %s: are no range that connections come from", s.Ports)
		}
	})
}

// check checks everything that the controller can check.
func (s *PathSeal) check(p *problems, path Path) {
	switch {
	case s == nil:
	case path.Direction != model.Forward || path.From == "" || path.To == "":
		p.addf("seal: only a part between two ends, in the chain's forward direction, has keys")
	case s.Domain != "":
		p.add(model.CheckTrustDomain(s.Domain), "seal: domain %q", s.Domain)
		if s.From != (SealKey{}) || s.To != (SealKey{}) {
			p.addf("seal: ends with certificates of a controller make their keys themselves; the path has none")
		}
	case s.FromRevocations != 0 || s.ToRevocations != 0:
		p.addf("seal: only ends with certificates of a controller have revocations; the path has keys")
	case s.From == SealKey{} || s.To == SealKey{}:
		p.addf("seal: its two ends have a key each")
	}
}

// The types below mirror the files.

type pathSealFile struct {
	From   *sealKeyFile `json:"from,omitempty"`
	To     *sealKeyFile `json:"to,omitempty"`
	Domain string       `json:"domain,omitempty"`

	FromRevocations uint32 `json:"from-revocations,omitempty"`
	ToRevocations   uint32 `json:"to-revocations,omitempty"`
}

type sealFile struct {
	Name      string         `json:"name"`
	Key       *sealKeyFile   `json:"key,omitempty"`
	Peer      string         `json:"peer"`
	PeerKey   *sealKeyFile   `json:"peer-key,omitempty"`
	Certified bool           `json:"certified,omitempty"`
	Origin    netip.AddrPort `json:"origin"`
	Ports     model.Ports    `json:"ports"`

	Revocations     uint32 `json:"revocations,omitempty"`
	PeerRevocations uint32 `json:"peer-revocations,omitempty"`
}

type sealOriginFile struct {
	Service string `json:"service"`
	CA      string `json:"ca"`
	Name    string `json:"name"`
}

func pathSealToFile(s *PathSeal) *pathSealFile {
	if s == nil {
		return nil
	}
	return &pathSealFile{keyToFile(s.From), keyToFile(s.To), s.Domain, s.FromRevocations, s.ToRevocations}
}

func (f *pathSealFile) seal() *PathSeal {
	if f == nil {
		return nil
	}
	return &PathSeal{SealKey(f.From.key()), SealKey(f.To.key()), f.Domain, f.FromRevocations, f.ToRevocations}
}

func sealToFile(s *Seal) *sealFile {
	if s == nil {
		return nil
	}
	return &sealFile{s.Name, keyToFile(s.Key), s.Peer, keyToFile(s.PeerKey), s.Certified, s.Origin, s.Ports, s.Revocations, s.PeerRevocations}
}

func (f *sealFile) seal() *Seal {
	if f == nil {
		return nil
	}
	return &Seal{
		Name: f.Name, Key: SealKey(f.Key.key()), Peer: f.Peer, PeerKey: SealPublic(f.PeerKey.key()), Certified: f.Certified,
		Revocations: f.Revocations, PeerRevocations: f.PeerRevocations, Origin: f.Origin, Ports: f.Ports,
	}
}

func sealOriginsToFile(list []SealOrigin) (out []sealOriginFile) {
	for _, o := range list {
		out = append(out, sealOriginFile(o))
	}
	return out
}

func sealOriginsOf(list []sealOriginFile) (out []SealOrigin) {
	for _, o := range list {
		out = append(out, SealOrigin(o))
	}
	return out
}

// sealKeyFile is a key of an end in a file, secret or public: 64 hexadecimal digits.
type sealKeyFile [32]byte

// keyToFile leaves a key out that is none.
func keyToFile[K ~[32]byte](k K) *sealKeyFile {
	if k == (K{}) {
		return nil
	}
	f := sealKeyFile(k)
	return &f
}

func (k *sealKeyFile) key() sealKeyFile {
	if k == nil {
		return sealKeyFile{}
	}
	return *k
}

func (k sealKeyFile) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, k[:]), nil }

func (k *sealKeyFile) UnmarshalText(b []byte) error {
	if len(b) != 2*len(k) {
		return fmt.Errorf("a key of a sealed part is not %d hexadecimal digits", 2*len(k))
	}
	if _, err := hex.Decode(k[:], b); err != nil {
		return fmt.Errorf("a key of a sealed part is not %d hexadecimal digits", 2*len(k))
	}
	return nil
}

func (sealKeyFile) String() string   { return pot.Redacted }
func (sealKeyFile) GoString() string { return pot.Redacted }
