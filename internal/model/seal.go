package model

import (
	"errors"
	"fmt"
	"strings"
)

// CheckSeal finds settings for seals that a chain cannot have: seal itself, or a
// function that reads payload. CheckOnward has the rules of all chains of a gateway.
func (c Chain) CheckSeal(function func(name string) Function) (list []OnwardProblem) {
	add := func(field string, i int, format string, args ...any) {
		list = append(list, OnwardProblem{field, i, fmt.Errorf(format, args...)})
	}
	if c.Seal && c.Onward == nil {
		add("seal", 0, "no rule of a service names this chain, and so far only a gateway's data is sealed; leave it out, or make a rule that names the chain")
		return list
	}
	for i, name := range c.Functions {
		switch f := function(name); {
		case !c.Seal && f.Intrusive && c.Onward == nil:
			add("functions", i, "%q is intrusive, and receives only data that is sealed for it; set seal: true at the chain, or make a second function without intrusive", name)
		case c.Seal && f.Kind == KindStream && !f.Intrusive:
			add("functions", i, "%q is of kind stream, and would receive sealed bytes without a key for them; set intrusive: true at the function, or leave it out", name)
		case c.Seal && f.Stream.Attached != Attached{} && c.Onward.Origin.Port() == StreamPlainPort:
			add("functions", i, "%q gets plain connections to port %d, and the service's origin is at that port, so the two kinds of connections could not be distinguished; give the origin another port", name, StreamPlainPort)
		}
	}
	return list
}

// CheckIntrusive checks the kind of a function that reads payload.
func CheckIntrusive(intrusive bool, k Kind) error {
	if intrusive && k != KindStream {
		return errors.New("is so far only for functions of the kinds stream, unaware and netfilter: other kinds cannot open sealed data; leave it out")
	}
	return nil
}

// SealDomain is the trust domain in the names of ends whose keys are in plans.
const SealDomain = "waystamp"

// SealName is the name in the certificate of an end whose key is in a plan: a SPIFFE identity. function is
// GatewayName for a gateway.
func SealName(node, function string) string { return SealNameIn(SealDomain, node, function) }

// SealNameIn is the name in the certificate of an end, in a trust domain.
func SealNameIn(domain, node, function string) string {
	return "spiffe://" + domain + "/node/" + node + "/function/" + function
}

// CheckTrustDomain checks the name of a trust domain (SPIFFE-ID section 2.1).
func CheckTrustDomain(name string) error {
	if name == "" || len(name) > 255 || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789.-_") != "" {
		return errors.New("is no trust domain: it has 1 to 255 of a-z, 0-9, dot, hyphen and underscore")
	}
	return nil
}
