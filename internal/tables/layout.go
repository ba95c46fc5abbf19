package tables

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/model"
)

// Wiring describes the machine for Desire.
type Wiring struct {
	Ports map[uint32]abi.Port
	Reach map[string]Reach
	Cpus  int
}

// WindowKey identifies a replay window. Other secrets have numbers of their own, also for the
// same path and epoch: a chain that was removed from the file and added again begins at epoch 1
// again.
type WindowKey struct {
	CounterKey
	Secrets uint64 // digest of the secrets with which the egress verifies
}

// SecretsOf is a digest of one epoch's secrets: the beginning of a hash, in slabs and on disk,
// which does not reveal them.
func SecretsOf(e *abi.Egress) uint64 {
	h := sha256.New()
	fmt.Fprint(h, "waystamp replay window", e.Keys, e.Secret, e.Key)
	return binary.BigEndian.Uint64(h.Sum(nil))
}

func (k CounterKey) String() string {
	return fmt.Sprintf("path 0x%08x, epoch %d", abi.BE32(k.Path), k.Epoch)
}

// Window is the replay window of a path in one epoch.
type Window struct {
	Key   WindowKey
	Lanes int
	Size  int // numbers of each lane, a power of two
}

func (w Window) String() string { return "replay window of " + w.Key.CounterKey.String() }

// Words is the number of a window's words, without its head.
func (w Window) Words() int { return w.Lanes * w.Size / 4 }

// WindowSlot is where a window is.
type WindowSlot struct {
	Window
	At int // its first word that counts
}

func (w WindowSlot) Head() int { return w.At - abi.WindowHead }
func (w WindowSlot) End() int  { return w.At + w.Words() }

// Placed has the places of all windows and slots in the slabs.
type Placed struct {
	Windows map[WindowKey]WindowSlot
	Numbers map[CounterKey]uint32 // slot
}

// windowSpace assigns places in the slabs to windows.
type windowSpace struct {
	have map[WindowKey]WindowSlot
	used []WindowSlot // in their order
}

func NewWindowSpace(have map[WindowKey]WindowSlot) *windowSpace {
	s := &windowSpace{have: map[WindowKey]WindowSlot{}}
	for k, w := range have {
		s.have[k] = w
		s.used = append(s.used, w)
	}
	slices.SortFunc(s.used, func(a, b WindowSlot) int { return a.At - b.At })
	return s
}

// Get returns a window's first word: where it is, or the lowest room that fits. A
// window never changes its shape: it would forget.
func (s *windowSpace) Get(w Window) (uint32, error) {
	if have, ok := s.have[w.Key]; ok {
		if have.Window != w {
			return 0, fmt.Errorf("the %s has %d lanes of %d numbers and the plan wants %d lanes of %d; give the path a new epoch (waystamp plan does)",
				w, have.Lanes, have.Size, w.Lanes, w.Size)
		}
		return uint32(have.At), nil
	}
	slot := WindowSlot{Window: w, At: abi.WindowHead}
	i := 0
	for ; i < len(s.used) && slot.End() > s.used[i].Head(); i++ {
		slot.At = s.used[i].End() + abi.WindowHead
	}
	if most := abi.WindowSlabs * abi.WindowSlab; slot.End() > most {
		return 0, fmt.Errorf("no room is left for the %s, which takes %d KiB: the replay windows of %d paths and epochs are in the %d MiB that a node can have; take paths out of the plan, and when that is in force put the new ones in",
			w, model.WindowMemory(w.Lanes, w.Size)>>10, len(s.used), most>>17)
	}
	s.used = slices.Insert(s.used, i, slot)
	s.have[w.Key] = slot
	return uint32(slot.At), nil
}

// placeSize is how many entries ws_places needs for a locator: two for each SID.
func placeSize(locator netip.Prefix) uint32 {
	return 2 << min(64-locator.Bits(), bits.Len(uint(ChainsMax))-1)
}
