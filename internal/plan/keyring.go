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

// Keyring keeps what must outlive a compilation, and makes what is new. A path
// whose hops and headends did not change keeps its SIDs, epoch and secrets; one
// that changed gets the next epoch and fresh secrets, since a node that is not
// on it any more knows the old ones.
type Keyring struct {
	random io.Reader
	paths  map[direction]Path
	rotate func(chain string) bool
	keep   bool   // no SID of the last compilation is given to another path, or place
	also   []Path // nor are those of these

	beyond map[uint32][]uint8 // by path: epochs before which none is given out any more
}

// direction names a path by what the operator wrote.
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
	k := &Keyring{random: random, paths: make(map[direction]Path, len(last)), rotate: func(string) bool { return false }}
	for _, p := range last {
		k.paths[p.direction()] = p
	}
	return k
}

// KeepSIDs gives no SID of the last compilation to anything else, so that nodes can hold
// both; nor those of paths of earlier ones that nodes still hold.
func (k *Keyring) KeepSIDs(also ...Path) { k.keep, k.also = true, also }

// Rotate gives paths of these chains the next epoch and fresh secrets though nothing changes.
func (k *Keyring) Rotate(chain func(name string) bool) { k.rotate = chain }

// Beyond gives fresh secrets an epoch later than any that the same path has in these.
func (k *Keyring) Beyond(paths ...Path) {
	k.beyond = map[uint32][]uint8{}
	for _, p := range paths {
		k.beyond[p.Path] = append(k.beyond[p.Path], p.Epoch)
	}
}

// kept are the SIDs that nothing new may have.
func (k *Keyring) kept() map[netip.Addr]bool {
	sids := map[netip.Addr]bool{}
	if !k.keep {
		return sids
	}
	for _, p := range k.paths {
		for _, h := range p.Hops[1:] {
			sids[h.SID] = true
		}
	}
	for _, p := range k.also {
		for _, h := range p.Hops[1:] {
			sids[h.SID] = true
		}
	}
	return sids
}

func (p PathID) direction() direction { return direction{p.Chain, p.Direction, p.From, p.To} }

// sids are those of the hops behind the headend as the last compilation gave them
// out, if the path still visits the same functions on nodes whose locators still
// hold them.
func (k *Keyring) sids(p Path, locators map[string]netip.Prefix) ([]netip.Addr, bool) {
	last, ok := k.paths[p.direction()]
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
	if last, ok := k.paths[p.direction()]; ok {
		if last.sameSecrets(*p) && !k.rotate(p.Chain) {
			p.Epoch, p.Shares, p.Verifier, p.Seal = last.Epoch, last.Shares, last.Verifier, last.Seal
			return nil
		}
		p.Epoch = last.Epoch + 1 // after 255 comes 0
	}
	for _, e := range k.beyond[p.Path] {
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
		if err := p.Seal.fresh(k.random); err != nil {
			return fmt.Errorf("%s: %w", p.PathID, err)
		}
	}
	return nil
}

// sameSecrets says whether the secrets of p serve q: the same positions at the
// same places, no lane that another headend has used numbers of, and a replay
// window of the same size, so that it need not be made anew and forget. Another
// encapsulation or waypoint needs an epoch of its own: an egress takes one segment
// list in each.
func (p Path) sameSecrets(q Path) bool {
	return p.Path == q.Path && p.Scheme == q.Scheme && p.Encapsulation == q.Encapsulation && len(p.Shares) == len(q.Hops) &&
		slices.EqualFunc(p.Hops, q.Hops, Hop.equal) && slices.Equal(p.Ingress, q.Ingress) && p.Window == q.Window &&
		(p.Seal == nil) == (q.Seal == nil)
}
