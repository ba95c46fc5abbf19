package plan

import (
	"reflect"
	"slices"
)

// Equal reports whether two plans are the same in all, the order of their parts among it.
func (n Node) Equal(o Node) bool {
	return n.shares(o) || sameParts(n.Headends, o.Headends, Headend.Equal) && sameParts(n.Endpoints, o.Endpoints, Endpoint.Equal) && sameParts(n.Egresses, o.Egresses, Egress.Equal) &&
		reflect.DeepEqual(n.beside(), o.beside())
}

// shares reports whether two plans are the same memory, as CompileAfter leaves them where nothing changes. Plans that do not share
// may be equal.
func (n Node) shares(o Node) bool {
	return n.Name == o.Name && n.Revision == o.Revision && n.Block == o.Block && n.Address == o.Address && n.Locator == o.Locator && n.Advertise == o.Advertise && n.MPLS == o.MPLS &&
		sameMemory(n.Interfaces, o.Interfaces) && sameMemory(n.Headends, o.Headends) && sameMemory(n.Endpoints, o.Endpoints) &&
		sameMemory(n.Egresses, o.Egresses) && sameMemory(n.Proxies, o.Proxies)
}

// beside is a plan without its parts in paths.
func (n Node) beside() Node {
	n.Headends, n.Endpoints, n.Egresses = nil, nil, nil
	return n
}

func sameParts[T any](a, b []T, equal func(T, T) bool) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.EqualFunc(a, b, equal))
}

// Equal reports whether two headends are the same in all.
func (h Headend) Equal(o Headend) bool {
	return h.PathID == o.PathID && h.Match == o.Match && h.Own == o.Own && equalList(h.Segments, o.Segments) && equalList(h.NodeLabels, o.NodeLabels) &&
		h.Lane == o.Lane && h.Lanes == o.Lanes && h.MTU == o.MTU && h.MSS == o.MSS && h.Share == o.Share && equalAt(h.Seal, o.Seal) && equalList(h.Origins, o.Origins)
}

// Equal reports whether two visits are the same in all.
func (e Endpoint) Equal(o Endpoint) bool {
	return e.PathID == o.PathID && e.SID == o.SID && e.Behaviour == o.Behaviour && e.Argument == o.Argument && e.Function == o.Function &&
		equalList(e.Sources, o.Sources) && e.Share == o.Share
}

// Equal reports whether two egresses are the same in all.
func (e Egress) Equal(o Egress) bool {
	return e.PathID == o.PathID && e.SID == o.SID && equalList(e.Sources, o.Sources) && e.Match == o.Match && equalList(e.Segments, o.Segments) &&
		e.OnViolation == o.OnViolation && e.Guard == o.Guard && e.Of == o.Of && equalAt(e.Through, o.Through) && e.Lanes == o.Lanes && e.Window == o.Window &&
		e.Share == o.Share && e.Verifier.Secret == o.Verifier.Secret && equalList(e.Verifier.Keys, o.Verifier.Keys) && equalAt(e.Seal, o.Seal)
}

// equalAt compares what two pointers are to; nil equals nil alone.
func equalAt[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// equalList does not look at lists of the same memory, as parts have them that were never encoded.
func equalList[T comparable](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0] || slices.Equal(a, b))
}

// Equal reports whether two paths are the same in all, secrets among it.
func (p Path) Equal(o Path) bool {
	return p.PathID == o.PathID && p.Match == o.Match && p.OwnTraffic == o.OwnTraffic && p.OnViolation == o.OnViolation && p.Guard == o.Guard && p.Window == o.Window &&
		equalList(p.Ingress, o.Ingress) && sameParts(p.Hops, o.Hops, Hop.same) && equalList(p.Shares, o.Shares) &&
		p.Verifier.Secret == o.Verifier.Secret && equalList(p.Verifier.Keys, o.Verifier.Keys) && p.MTU == o.MTU && p.MSS == o.MSS && equalAt(p.Seal, o.Seal)
}

// same is equal, with labels.
func (h Hop) same(o Hop) bool {
	return h.equal(o) && h.NodeLabel == o.NodeLabel && h.ServiceLabel == o.ServiceLabel
}
