package model

import (
	"encoding"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"
)

// IdentityKind is the kind of subject alternative name that identifies a certificate's holder.
type IdentityKind string

// Kinds of identities.
const (
	IdentitySPIFFE IdentityKind = "spiffe"
	IdentityEmail  IdentityKind = "email"
	IdentityDNS    IdentityKind = "dns"
	IdentityURI    IdentityKind = "uri"
)

// Clients are the holders of certificates of one authority.
type Clients struct {
	Name string
	CA   string // a file
	Kind IdentityKind
	// Within is the trust domain, mail domain, DNS suffix or beginning of the URI that
	// identities have.
	Within string
	// Revocation is by a list, by responders of OCSP, or by short lives alone.
	CRL       string        // a file; "": none
	OCSP      bool          // responders are asked
	Responder string        // a URL; "": the one that a certificate names
	OlderThan time.Duration // a list or an answer that is older counts as none
	Lifetime  time.Duration // no certificate lives longer; 0: any may
	At        Source        // of the CA, for messages
	CRLAt     Source
}

// Service is a service behind a gateway.
type Service struct {
	Name        string
	Hosts       []string // lower case
	Nodes       []string
	Address     netip.AddrPort
	Certificate string // a file
	Key         string // a file; "": Signer
	Signer      string // a unix socket, at which another process signs with the key; "": Key
	Clients     string
	Origin      Origin
	Rules       []ServiceRule
	Opaque      Opaque
	Mode        GatewayMode
	// Destinations are what clients of a gateway in mode connect may ask for; it has no Origin.
	Destinations []Destination
	Headers      ClientHeaders // of a service of HTTP; else none

	At, CertificateAt, KeyAt Source
}

// Origin is where requests go on to.
type Origin struct {
	Address netip.AddrPort
	CA      string // a file; "": plain
	Name    string // that the origin's certificate is for
	CAAt    Source
}

// ClientHeaders are the names of headers by which an origin hears who a client is. "": it does not hear that.
type ClientHeaders struct {
	Certificate string // as RFC 9440 has it
	PEM         string // the certificate in PEM, with percent signs (RFC 3986 section 2.1), as nginx gives it
	Identity    string
	Serial      string // of the certificate, hexadecimal
}

// StandardHeaders are those of a service that names none.
func StandardHeaders() ClientHeaders { return ClientHeaders{Certificate: "Client-Cert"} }

// List has the names, with "" for those that are not there.
func (h ClientHeaders) List() []string { return []string{h.Certificate, h.PEM, h.Identity, h.Serial} }

// CheckHeaderName holds the rule for names of headers by which an origin hears who a client is.
func CheckHeaderName(s string) error {
	const most = 64
	ok := s != "" && len(s) <= most && s[0] != '-' && s[len(s)-1] != '-'
	for _, c := range s {
		ok = ok && (c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-')
	}
	if !ok {
		return fmt.Errorf("is not the name of a header such as X-Client-Identity, of letters, digits and hyphens, at most %d", most)
	}
	switch lower := strings.ToLower(s); {
	case slices.Contains([]string{"host", "connection", "keep-alive", "te", "trailer", "upgrade", "expect", "cookie", "date", "range", "accept", "origin", "referer", "user-agent", "http2-settings"}, lower),
		strings.HasPrefix(lower, "content-"), strings.HasPrefix(lower, "transfer-"), strings.HasPrefix(lower, "proxy-"), strings.HasPrefix(lower, "if-"), strings.HasPrefix(lower, "accept-"):
		return fmt.Errorf("has a meaning in HTTP; expect a name of your own, such as X-Client-Identity")
	}
	return nil
}

// Check holds what the names must keep by themselves.
func (h ClientHeaders) Check() error {
	seen := map[string]bool{}
	for _, name := range h.List() {
		if name == "" {
			continue
		}
		if err := CheckHeaderName(name); err != nil {
			return fmt.Errorf("%q %w", name, err)
		}
		if lower := strings.ToLower(name); seen[lower] {
			return fmt.Errorf("%q is given twice", name)
		} else {
			seen[lower] = true
		}
	}
	return nil
}

// Opaque is how bytes of a service go on that are not HTTP. The zero value is of a service of HTTP.
type Opaque struct {
	On   bool
	ALPN []string      // protocols, of which clients and origin have to agree on one; none: they are not asked
	Idle time.Duration // after which a connection without a byte ends
}

// Protocol is the service's, as the domain file names it, or connect.
func (s Service) Protocol() string {
	switch {
	case s.Mode == ModeConnect:
		return string(ModeConnect)
	case s.Opaque.On:
		return "tls"
	}
	return "http"
}

// Bounds of opaque connections.
const (
	OpaqueIdle    = time.Hour // unless the file says so
	OpaqueIdleMin = time.Second
	OpaqueIdleMax = 7 * 24 * time.Hour
	ALPNMax       = 8 // names of a service
)

// CheckALPN holds the rule for names of protocols (RFC 7301). Those of HTTP are not opaque.
func CheckALPN(s string) error {
	const most = 64
	switch {
	case s == "" || len(s) > most || strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' }):
		return fmt.Errorf("is not the name of a protocol as ALPN has it, such as postgresql, of at most %d characters", most)
	case s == "h2" || s == "h3" || strings.HasPrefix(s, "http/"):
		return fmt.Errorf("is HTTP, whose requests the gateway decides about; leave protocol out, or name another one")
	}
	return nil
}

// Check holds what settings must keep by themselves.
func (o Opaque) Check() error {
	switch {
	case !o.On && (len(o.ALPN) > 0 || o.Idle != 0):
		return fmt.Errorf("alpn and idle are of services with protocol tls")
	case !o.On:
		return nil
	case o.Idle < OpaqueIdleMin || o.Idle > OpaqueIdleMax:
		return fmt.Errorf("idle %s is not from %s to %s", o.Idle, OpaqueIdleMin, OpaqueIdleMax)
	case len(o.ALPN) > ALPNMax:
		return fmt.Errorf("alpn has %d names; expect at most %d", len(o.ALPN), ALPNMax)
	}
	for i, name := range o.ALPN {
		if err := CheckALPN(name); err != nil {
			return fmt.Errorf("alpn: %q %w", name, err)
		}
		if slices.Contains(o.ALPN[:i], name) {
			return fmt.Errorf("alpn: %q is given twice", name)
		}
	}
	return nil
}

// GatewayMode is how clients reach a gateway.
type GatewayMode string

// Modes of gateways.
const (
	ModeTransparent GatewayMode = ""        // at an address that is the service's own
	ModeOwn         GatewayMode = "own"     // at an address of the node
	ModeConnect     GatewayMode = "connect" // at an address of the node, as a proxy: clients name destinations (RFC 9110 section 9.3.6)
)

// String is the mode as the domain file names it.
func (m GatewayMode) String() string {
	if m == ModeTransparent {
		return "transparent"
	}
	return string(m)
}

// Destination is what a client of a proxy may ask for, and where that leads.
type Destination struct {
	Host    string // lower case
	Port    uint16
	Address netip.AddrPort
}

// Name is what clients ask for, a host and a port.
func (d Destination) Name() string { return fmt.Sprintf("%s:%d", d.Host, d.Port) }

// DestinationsMax is how many destinations a service has at most.
const DestinationsMax = 256

// Destination is the one of a name.
func (s Service) Destination(name string) (Destination, bool) {
	return find(s.Destinations, func(d Destination) bool { return d.Name() == name })
}

// Leads are the addresses that connections of a rule go to: one, unless the rule breaks a rule.
func (s Service) Leads(r ServiceRule) (to []netip.AddrPort) {
	if s.Mode != ModeConnect {
		return []netip.AddrPort{s.Origin.Address}
	}
	for _, name := range r.To {
		if d, ok := s.Destination(name); ok && !slices.Contains(to, d.Address) {
			to = append(to, d.Address)
		}
	}
	return to
}

// checkDestinations holds what a proxy's destinations must keep, and that nothing else has some.
func (s Service) checkDestinations() error {
	if s.Mode != ModeConnect {
		if len(s.Destinations) > 0 {
			return fmt.Errorf("destinations: are of gateways in mode connect")
		}
		return nil
	}
	switch {
	case s.Origin != (Origin{CAAt: s.Origin.CAAt}):
		return fmt.Errorf("origin: a gateway in mode connect has destinations")
	case len(s.Destinations) == 0 || len(s.Destinations) > DestinationsMax:
		return fmt.Errorf("destinations: has %d; a proxy has 1 to %d", len(s.Destinations), DestinationsMax)
	case !s.Opaque.On || len(s.Opaque.ALPN) > 0:
		return fmt.Errorf("protocol: a proxy does not read what it carries")
	}
	seen := map[string]bool{}
	for _, d := range s.Destinations {
		if err := CheckHost(d.Host); err != nil {
			return fmt.Errorf("destinations: %q %w", d.Host, err)
		}
		if err := CheckServiceAddress(d.Address); err != nil || d.Port == 0 {
			return fmt.Errorf("destinations: %s: %q %w", d.Name(), d.Address, err)
		}
		if seen[d.Name()] {
			return fmt.Errorf("destinations: %s is given twice", d.Name())
		}
		if s.Address.Addr().Is4() != d.Address.Addr().Is4() {
			return fmt.Errorf("destinations: %s is of another version of IP than %s", d.Address, s.Address)
		}
		seen[d.Name()] = true
	}
	return nil
}

// Plain reports whether connections to the origin are without TLS.
func (o Origin) Plain() bool { return o.CA == "" }

// ServiceRule lets requests in, by a chain. Empty fields take all.
type ServiceRule struct {
	Who     string
	Hosts   []string
	Methods []string
	Path    string
	Headers []ServiceHeader
	To      []string // names of destinations, in mode connect
	Chain   string
}

// ServiceHeader is a header of a request that has one value, this one.
type ServiceHeader struct{ Name, Value string }

// Bounds of gateways.
const (
	HostsMax          = 64   // of a service
	ServiceRulesMax   = 1024 // of a service
	OlderThanMin      = time.Minute
	OlderThanMax      = 30 * 24 * time.Hour
	AnswerOlderThan   = 24 * time.Hour // of responders of OCSP, unless the file says so
	ClientLifetimeMin = time.Minute
	ClientLifetimeMax = 30 * 24 * time.Hour
)

var _ encoding.TextUnmarshaler = (*IdentityKind)(nil)

// UnmarshalText reads a kind.
func (k *IdentityKind) UnmarshalText(text []byte) error {
	switch v := IdentityKind(text); v {
	case IdentitySPIFFE, IdentityEmail, IdentityDNS, IdentityURI:
		*k = v
		return nil
	}
	return fmt.Errorf("%q is not a kind of identity; expect spiffe, email, dns or uri", text)
}

// CheckHost holds the rule for names of hosts: DNS names of two labels or more, in small letters.
func CheckHost(s string) error {
	const most = 253
	if len(s) > most || !strings.Contains(s, ".") || strings.ToLower(s) != s {
		return fmt.Errorf("is not a name of a host such as shop.example.org, in small letters")
	}
	for label := range strings.SplitSeq(s, ".") {
		ok := label != "" && len(label) <= 63 && label[0] != '-' && label[len(label)-1] != '-'
		for _, c := range label {
			ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-')
		}
		if !ok {
			return fmt.Errorf("is not a name of a host such as shop.example.org, in small letters")
		}
	}
	if _, err := netip.ParseAddr(s); err == nil {
		return fmt.Errorf("is an address; TLS names hosts alone (RFC 6066 section 3)")
	}
	return nil
}

// CheckResponder holds the rule for URLs of responders of OCSP. Their answers are signed, so that HTTP is enough (RFC 6960 appendix A).
func CheckResponder(s string) error {
	const most = 256
	u, err := url.Parse(s)
	switch {
	case len(s) > most || err != nil || u.Scheme != "http" || u.Hostname() == "" || u.User != nil || u.Fragment != "" || u.Opaque != "" ||
		strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c > '~' }):
		return fmt.Errorf("is not a URL of a responder such as http://ocsp.example.org:8080/, of at most %d characters", most)
	}
	return nil
}

// CheckWithin checks a setting within for identities of a kind.
func CheckWithin(kind IdentityKind, s string) error {
	switch kind {
	case IdentityDNS, IdentityEmail:
		return CheckHost(s)
	case IdentitySPIFFE:
		ok := s != "" && len(s) <= 255
		for _, c := range s {
			ok = ok && (c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_')
		}
		if !ok {
			return fmt.Errorf("is not a trust domain such as staff.example, in small letters")
		}
	case IdentityURI:
		if !strings.Contains(s, ":") || !strings.HasSuffix(s, "/") && !strings.HasSuffix(s, ":") {
			return fmt.Errorf("is not the beginning of a URI, up to a slash or colon, such as https://id.example.org/")
		}
	}
	return nil
}
