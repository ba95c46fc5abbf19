// Package examples holds the example files, for the commands that show
// something without being given a file.
package examples

import _ "embed"

// PaperName is what messages about Paper call it.
const PaperName = "examples/paper.yaml"

// Paper is the network of Fig. 7a of the paper on ordered proof of transit.
//
//go:embed paper.yaml
var Paper []byte

// IPv4Name is what messages about IPv4 call it.
const IPv4Name = "examples/ipv4.yaml"

// IPv4 is a domain whose hosts speak both versions of IP.
//
//go:embed ipv4.yaml
var IPv4 []byte

// FunctionsName is what messages about Functions call it.
const FunctionsName = "examples/functions.yaml"

// Functions is a domain whose functions know nothing of segment routing: a
// firewall, a program in user space and a NAT.
//
//go:embed functions.yaml
var Functions []byte

// AttacksName is what messages about Attacks call it.
const AttacksName = "examples/attacks.yaml"

// Attacks is where waystamp lab attack mounts its attacks: all links meet at one
// router, and each scheme has two chains.
//
//go:embed attacks.yaml
var Attacks []byte

// NetfilterName is what messages about Netfilter call it.
const NetfilterName = "examples/netfilter.yaml"

// Netfilter is a domain with the kernel's packet filter as a function, which two
// chains visit with different arguments.
//
//go:embed netfilter.yaml
var Netfilter []byte

// ZeroTrustName is what messages about ZeroTrust call it.
const ZeroTrustName = "examples/zerotrust.yaml"

// ZeroTrust is a domain with a service behind a gateway. Files that it names are the reader's to make.
//
//go:embed zerotrust.yaml
var ZeroTrust []byte

// MPLSName is what messages about MPLS call it.
const MPLSName = "examples/mpls.yaml"

// MPLS is a domain whose chains go over labels, through a core of IPv4.
//
//go:embed mpls.yaml
var MPLS []byte

// StreamsName is what messages about Streams call it.
const StreamsName = "examples/streams.yaml"

// Streams is a domain with functions on the bytes of TCP connections: between two nodes they
// are compressed.
//
//go:embed streams.yaml
var Streams []byte

// SpareName is what messages about Spare call it.
const SpareName = "examples/spare.yaml"

// Spare is a domain with a function that can take the place of another one.
//
//go:embed spare.yaml
var Spare []byte
