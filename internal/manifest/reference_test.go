package manifest

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/model"
)

func TestEveryFieldIsDescribed(t *testing.T) {
	descriptions := Descriptions()
	seen := map[string]bool{}
	for _, f := range Fields() {
		d, ok := descriptions[f.Path]
		switch {
		case seen[f.Path]:
			t.Errorf("%s is in the outline twice", f.Path)
		case !ok || d.Text == "":
			t.Errorf("%s has no description; give it one in reference.go", f.Path)
		case !strings.HasSuffix(d.Text, "."):
			t.Errorf("%s: the description %q is no sentence", f.Path, d.Text)
		case f.Required && d.Default != "":
			t.Errorf("%s is required, and yet has the default %q", f.Path, d.Default)
		case !f.Required && d.Default == "":
			t.Errorf("%s may be left out; say its default, or %q", f.Path, " none")
		case !f.Mapping && f.Takes == "":
			t.Errorf("%s: the reader does not say which values it takes; call takes in its read function", f.Path)
		}
		seen[f.Path] = true
	}
	if len(seen) < 70 {
		t.Errorf("the outline has %d fields; there are more", len(seen))
	}
	for path := range descriptions {
		if !seen[path] {
			t.Errorf("%s is described, yet the reader knows no such field; take it out of reference.go", path)
		}
	}
}

func TestEveryMappingHasItsSection(t *testing.T) {
	want := []string{""}
	for _, f := range Fields() {
		if f.Mapping && f.List {
			want = append(want, f.Path+"[]")
		} else if f.Mapping {
			want = append(want, f.Path)
		}
	}
	var have []string
	for _, s := range Sections() {
		have = append(have, s.Path)
		if s.Title == "" || s.Text == "" {
			t.Errorf("section %q has no title or no text", s.Path)
		}
	}
	slices.Sort(want)
	slices.Sort(have)
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("sections of the page (-mappings of the reader +sections of reference.go):\n%s", diff)
	}
}

// everyDefault is a domain in which each field that has a default may stand: a comment
// #PATH takes its place.
const everyDefault = `version: 1
domain: {block: "fd00:5::/48"}
nodes:
  - name: a
    address: fd00:1::a
    locator: fd00:5:0:a00::/56
    #nodes[].cpus
    #nodes[].advertise
    interfaces:
      - name: a-h
        role: edge
        #nodes[].interfaces[].datapath
        #nodes[].interfaces[].unmatched
      - {name: a-b, role: core}
  - name: b
    address: fd00:1::b
    locator: fd00:5:0:b00::/56
    interfaces:
      - {name: b-a, role: core}
      - {name: b-h2, role: edge}
functions:
  - name: fw
    node: a
    kind: unaware
    attach: {to: fw0, from: fw0}
    #functions[].rewrites
    #functions[].cache
    #functions[].lifetime
  - name: nf
    node: a
    kind: netfilter
    #functions[].namespace
    #functions[].zones
    #functions[].bypass
  - name: zip
    node: a
    kind: stream
    run: [identity]
    #functions[].intrusive
    #functions[].connect
    #functions[].other
    limits:
      #functions[].limits.connections
      half-closed: 10m
  - name: unzip
    node: a
    kind: stream
    run: [identity]
    connect: early
    limits:
      #functions[].limits.buffer
      #functions[].limits.idle
      #functions[].limits.half-closed
      connections: 7
chains:
  - name: web
    ingress: [a]
    functions: [fw]
    egress: b
    match: {destination: "2001:db8::/64"}
    #chains[].own-traffic
    #chains[].direction
    #chains[].seal
    encapsulation:
      reduced: false
      #chains[].encapsulation.sids
      #chains[].encapsulation.type
    #chains[].mss-clamp
    proof:
      on-violation: drop
      #chains[].proof.scheme
      #chains[].proof.window
  - name: other
    ingress: [a]
    functions: [fw]
    egress: b
    match: {destination: "2001:db8:1::/64"}
    encapsulation:
      sids: plain
      #chains[].encapsulation.reduced
    proof:
      scheme: keyed
      #chains[].proof.on-violation
  - {name: light, ingress: [a], functions: [fw], egress: b, direction: both}
clients:
  - name: staff
    ca: ca.pem
    identity: {spiffe: staff.example}
    revocation:
      lifetime: 1h
      #clients[].revocation.ocsp
services:
  - name: shop
    hosts: [shop.example.org]
    gateway:
      nodes: [a]
      address: "[2001:db8:1::2]:443"
      #services[].gateway.mode
    certificate: {file: shop.pem, key: shop.key}
    clients: staff
    origin: {address: "[2001:db8:1::2]:443", tls: {ca: origin.pem, name: shop.internal}}
    rules: [{who: "**", chain: light}]
    #services[].protocol
lab:
  #lab.mtu
  #lab.routing
  #lab.core
  hosts:
    - name: h
      node: a
      prefix: 2001:db8:3::/64
      #lab.hosts[].mtu
    - {name: h2, node: b, prefix: "2001:db8::/64"}
  links:
    - between: [a, b]
  functions:
    - {name: fw, kind: raw}
`

var marker = regexp.MustCompile(`#(\S+)`)

// To write a default down changes nothing, so it is the default.
func TestDefaultsAreWhatTheReferenceSays(t *testing.T) {
	parse := func(src string) Manifest {
		t.Helper()
		m, err := Parse("defaults.yaml", []byte(src))
		if err != nil {
			t.Fatalf("%v\n%s", err, src)
		}
		return m
	}
	without := parse(everyDefault)
	described := map[string]bool{}
	for path, d := range Descriptions() {
		if d.Default != "" && d.Default[0] != ' ' {
			described[path] = true
		}
	}
	marked := map[string]bool{}
	for _, m := range marker.FindAllStringSubmatch(everyDefault, -1) {
		path := m[1]
		marked[path] = true
		name := path[strings.LastIndexByte(path, '.')+1:]
		with := parse(strings.Replace(everyDefault, m[0]+"\n", name+": "+Descriptions()[path].Default+"\n", 1))
		if diff := cmp.Diff(resolved(without), resolved(with), equal); diff != "" {
			t.Errorf("%s: %s is not the default (-left out +written down):\n%s", path, Descriptions()[path].Default, diff)
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(described)), slices.Sorted(maps.Keys(marked))); diff != "" {
		t.Errorf("fields with a default that the file of this test does not try (-described +tried):\n%s", diff)
	}
}

// resolved gives hosts that name no MTU what the lab gives them.
func resolved(m Manifest) Manifest {
	lab := *m.Lab
	lab.Hosts = slices.Clone(lab.Hosts)
	for i := range lab.Hosts {
		if lab.Hosts[i].MTU == 0 {
			lab.Hosts[i].MTU = mtuDefault
		}
	}
	m.Lab = &lab
	m.Domain.Clients, m.Domain.Services = nil, slices.Clone(m.Domain.Services)
	for i := range m.Domain.Services {
		s := &m.Domain.Services[i]
		s.At, s.CertificateAt, s.KeyAt, s.Origin.CAAt = model.Source{}, model.Source{}, model.Source{}, model.Source{} // the line moves
	}
	return m
}
