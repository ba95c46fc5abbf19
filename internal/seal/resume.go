package seal

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"sync"
	"time"
)

// A session between two ends is resumed (RFC 8446 section 2.2) by the same two ends, of the same path and epoch, with the
// same keys, in the same two processes. The exchange of keys is a new one each time (psk_dhe_ke, the only mode that
// crypto/tls has), and there is no early data.

// ticketTime is how long a key for tickets is used. Tickets of one before resume nothing.
const ticketTime = time.Hour

// resumedMax bounds the bindings that are kept: parts have a few each.
const resumedMax = 1024

// binding is what a ticket is good for.
type binding struct {
	path, epoch            uint32
	name, other, key, peer string
	roots                  [sha256.Size]byte // digest; zero where keys identify ends
	dials                  bool
}

// resumable is what an end has for one binding.
type resumable struct {
	kept    tls.ClientSessionCache // of who dials
	tickets [32]byte               // key of who accepts; in memory alone
	made    time.Time
}

// resumption is what this process has. It is in memory alone.
type resumption struct {
	mu  sync.Mutex
	of  map[binding]*resumable
	now func() time.Time
}

var resume = &resumption{of: map[binding]*resumable{}, now: time.Now}

// prepare lets sessions of an end in one epoch be resumed.
func (r *resumption) prepare(c *tls.Config, p *Part, e Epoch, dials bool) error {
	b := binding{p.Path, e.Number, p.Name, p.Other, string(e.Key), string(e.Peer), rootsOf(e), dials}
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	in := r.of[b]
	if in == nil || now.Before(in.made) || now.Sub(in.made) >= ticketTime {
		in = &resumable{made: now}
		if dials {
			in.kept = tls.NewLRUClientSessionCache(1)
		} else if _, err := rand.Read(in.tickets[:]); err != nil {
			return fmt.Errorf("make a key for tickets of %s: %w", p.Name, err)
		}
		if len(r.of) >= resumedMax {
			clear(r.of)
		}
		r.of[b] = in
	}
	if dials {
		c.ClientSessionCache = in.kept
	} else {
		// Not crypto/tls's own, which all configurations of one GetConfigForClient would share.
		c.SetSessionTicketKeys([][32]byte{in.tickets})
	}
	return nil
}
