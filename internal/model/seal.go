package model

import (
	"errors"
	"fmt"
)

// CheckSeal finds what a chain cannot have for what it says about seals: that it has one, or that a
// function on it reads payload. What every chain of a gateway keeps is CheckOnward's.
func (c Chain) CheckSeal(function func(name string) Function) (list []OnwardProblem) {
	add := func(field string, i int, format string, args ...any) {
		list = append(list, OnwardProblem{field, i, fmt.Errorf(format, args...)})
	}
	if c.Seal && c.Onward == nil {
		add("seal", 0, "no rule of a service names this chain, and only what a gateway sends is sealed yet; leave it out, or make a rule that names the chain")
		return list
	}
	for i, name := range c.Functions {
		switch f := function(name); {
		case !c.Seal && f.Intrusive && c.Onward == nil:
			add("functions", i, "%q is intrusive, and takes what is sealed for it and nothing else; say seal: true at the chain, or make a second function without intrusive", name)
		case c.Seal && f.Kind == KindStream && !f.Intrusive:
			add("functions", i, "%q is of kind stream, and would get sealed bytes that it has no key for; say intrusive: true at the function, or leave it out", name)
		case c.Seal && f.Stream.Attached != Attached{} && c.Onward.Origin.Port() == StreamPlainPort:
			add("functions", i, "%q gets plain connections to port %d, and the service's origin is at that port, so that they could not be told apart from sealed ones; give the origin another port", name, StreamPlainPort)
		}
	}
	return list
}

// CheckIntrusive holds the rule for functions that read payload.
func CheckIntrusive(intrusive bool, k Kind) error {
	if intrusive && k != KindStream {
		return errors.New("is of functions of the kinds stream and unaware alone yet: nothing opens what is sealed for others; leave it out")
	}
	return nil
}

// SealName is what the certificate of an end says: a SPIFFE identity. function is GatewayName for
// a gateway.
func SealName(node, function string) string {
	return "spiffe://waystamp/node/" + node + "/function/" + function
}
