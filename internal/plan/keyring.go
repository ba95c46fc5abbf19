package plan

import (
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/pot"
)

// epochFirst is the epoch of a path that is new.
const epochFirst = 1

// Keyring keeps the values that outlive a compilation, and makes new ones. A path with the same
// hops and headends keeps its SIDs, epoch and secrets. A path with other hops or headends gets
// the next epoch and fresh secrets, since a node that has left the path has the old secrets.
type Keyring struct {
	random      io.Reader
	last        []Path
	paths       map[direction]Path // last; nil: nobody has asked for it
	rotate      func(chain string) bool
	revocations map[string]uint32 // of nodes, by name
	domain      string            // that signs the keys of ends of sealed parts; "": the keyring makes them
	keep        bool              // a SID of the last compilation goes to no other path or place
	also        [][]Path          // their SIDs go to no other path or place either

	later  [][]Path           // a new epoch is later than that of the same path in these
	beyond map[uint32][]uint8 // later, by path; nil: nobody has asked for it
}

// direction is a path's name, from the operator's file.
type direction struct {
	chain string
	is    model.Direction
	from  string
	to    string
}

// NewKeyring makes a keyring from the paths of the last compilation, nil if
// there was none, and a source of random bytes: crypto/rand.Reader but in
// tests. It keeps references to the paths.
func NewKeyring(random io.Reader, last []Path) *Keyring {
	return &Keyring{random: random, last: last, rotate: func(string) bool { return false }}
}

// of is a path of the last compilation.
func (k *Keyring) of(d direction) (Path, bool) {
	if k.paths == nil {
		k.paths = make(map[direction]Path, len(k.last))
		for _, p := range k.last {
			k.paths[p.direction()] = p
		}
	}
	p, ok := k.paths[d]
	return p, ok
}

// few is the keyring with only some of its last paths.
func (k *Keyring) few(last []Path) *Keyring {
	return &Keyring{random: k.random, last: last, rotate: k.rotate, domain: k.domain, revocations: k.revocations}
}

// epochsOf are epochs of a path that a new one is later than.
func (k *Keyring) epochsOf(path uint32) []uint8 {
	if k.beyond == nil {
		k.beyond = map[uint32][]uint8{}
		for _, list := range k.later {
			for i := range list {
				p := &list[i]
				k.beyond[p.Path] = append(k.beyond[p.Path], p.Epoch)
			}
		}
	}
	return k.beyond[path]
}

// beyondOf is what epochsOf gives of some paths.
func (k *Keyring) beyondOf(paths []Path, some []int) map[uint32][]uint8 {
	out := make(map[uint32][]uint8, len(some))
	for _, i := range some {
		out[paths[i].Path] = nil
	}
	for _, list := range k.later {
		for i := range list {
			p := &list[i]
			if have, ok := out[p.Path]; ok {
				out[p.Path] = append(have, p.Epoch)
			}
		}
	}
	return out
}

// KeepSIDs assigns no SID of the last compilation to another path or place, so that nodes can
// hold both compilations. The same holds for SIDs of lists of earlier paths that nodes still hold.
func (k *Keyring) KeepSIDs(also ...[]Path) { k.keep, k.also = true, also }

// Certify leaves the keys of ends of sealed parts to these ends: the controller of a trust domain signs them. A path that is
// kept from the last compilation keeps its ends' keys, until its next epoch.
//
// revocations is how often nodes were revoked, by name: new epochs have it.
func (k *Keyring) Certify(domain string, revocations map[string]uint32) {
	k.domain, k.revocations = domain, revocations
}

// Rotate gives the paths of these chains the next epoch and fresh secrets without a change.
func (k *Keyring) Rotate(chain func(name string) bool) { k.rotate = chain }

// Beyond gives fresh secrets a later epoch than the same path has in any of these lists.
func (k *Keyring) Beyond(paths ...[]Path) { k.later, k.beyond = paths, nil }

// kept are the SIDs that nothing new may have.
func (k *Keyring) kept() map[netip.Addr]bool {
	sids := map[netip.Addr]bool{}
	if !k.keep {
		return sids
	}
	for _, p := range k.last {
		for _, h := range p.Hops[1:] {
			sids[h.SID] = true
		}
	}
	for _, list := range k.also {
		for _, p := range list {
			for _, h := range p.Hops[1:] {
				sids[h.SID] = true
			}
		}
	}
	return sids
}

func (p PathID) direction() direction { return direction{p.Chain, p.Direction, p.From, p.To} }

// sids are the SIDs of the hops behind the headend in the last compilation, if the path still
// visits the same functions, on nodes whose locators still contain the SIDs.
func (k *Keyring) sids(p Path, locators map[string]netip.Prefix) ([]netip.Addr, bool) {
	last, ok := k.of(p.direction())
	if !ok || len(last.Hops) != len(p.Hops) {
		return nil, false
	}
	var sids []netip.Addr
	for i, h := range last.Hops[1:] {
		now := p.Hops[i+1]
		if h.Node != now.Node || h.Function != now.Function || !locators[now.Node].Contains(h.SID) {
			return nil, false
		}
		sids = append(sids, h.SID)
	}
	return sids, true
}

// secrets fills in epoch, shares and verifier of a path that is otherwise
// complete.
func (k *Keyring) secrets(p *Path) error {
	p.Epoch = epochFirst
	if last, ok := k.of(p.direction()); ok {
		if last.sameSecrets(*p) && !k.rotate(p.Chain) {
			p.Epoch, p.Shares, p.Verifier, p.Seal = last.Epoch, last.Shares, last.Verifier, last.Seal
			return nil
		}
		p.Epoch = last.Epoch + 1 // after 255 comes 0
	}
	for _, e := range k.epochsOf(p.Path) {
		if int8(e-p.Epoch) >= 0 {
			p.Epoch = e + 1
		}
	}
	var err error
	p.Shares, p.Verifier, err = pot.Generate(k.random, p.Scheme, len(p.Hops))
	if err != nil {
		return fmt.Errorf("%s: %w", p.PathID, err)
	}
	if p.Seal != nil {
		if err := p.Seal.fresh(k.random, k.domain, k.revocations, p.Hops); err != nil {
			return fmt.Errorf("%s: %w", p.PathID, err)
		}
	}
	return nil
}

// sameSecrets reports whether the secrets of p can be used for q: the positions and places are
// the same, no lane has numbers that another headend used, and the replay window has the same
// size, so that it is not replaced by an empty one. Another encapsulation or waypoint needs a
// new epoch: an egress accepts one segment list per epoch.
func (p Path) sameSecrets(q Path) bool {
	return p.Path == q.Path && p.Scheme == q.Scheme && p.Encapsulation == q.Encapsulation && len(p.Shares) == len(q.Hops) &&
		slices.EqualFunc(p.Hops, q.Hops, Hop.equal) && slices.Equal(p.Ingress, q.Ingress) && p.Window == q.Window &&
		(p.Seal == nil) == (q.Seal == nil)
}
