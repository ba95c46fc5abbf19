package agent

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/seal"
	"github.com/waystamp/waystamp/internal/stream"
)

// rootsMax bounds the files of origins' authorities, in bytes: they are handed over with each
// connection.
const rootsMax = 64 << 10

// identities has the keys and certificates of the node's own ends, by their names, where its controller signs them; nil: it has no
// controller.
type identities func(name string) (seal.Identity, error)

func (own identities) epochOf(p plan.PathID, s *plan.Seal) (seal.Epoch, error) {
	if !s.Certified {
		return seal.Epoch{Number: uint32(p.Epoch), Key: ed25519.NewKeyFromSeed(s.Key[:]), Peer: ed25519.PublicKey(s.PeerKey[:])}, nil
	}
	if own == nil {
		return seal.Epoch{}, fmt.Errorf("the plan is a controller's, who signs the key of %s, and this agent has none: start it with --controller", s.Name)
	}
	is, err := own(s.Name)
	return seal.Epoch{Number: uint32(p.Epoch), Key: is.Key, Certificate: is.Certificate, Roots: is.Roots, PeerRevocations: s.PeerRevocations}, err
}

func (own identities) partOf(p plan.PathID, s *plan.Seal) (*seal.Part, error) {
	e, err := own.epochOf(p, s)
	if err != nil {
		return nil, err
	}
	return &seal.Part{Chain: p.Chain, Path: p.Path, Name: s.Name, Other: s.Peer, Epochs: []seal.Epoch{e}}, nil
}

// sealedOnward finds how connections of the gateway's are sealed that take a chain; false: up to the origin they are not.
func sealedOnward(n plan.Node, c plan.GatewayChain) (plan.Headend, bool) {
	for _, h := range n.Headends {
		if h.Path == c.Forward && h.From == model.GatewayName && h.Seal != nil {
			return h, true
		}
	}
	return plan.Headend{}, false
}

// sealOnward is the same with the keys; nil: they are not sealed.
func sealOnward(n plan.Node, c plan.GatewayChain, own identities) (*seal.Part, error) {
	h, ok := sealedOnward(n, c)
	if !ok {
		return nil, nil
	}
	return own.partOf(h.PathID, h.Seal)
}

// endsOf answers an intrusive function's worker; nil: the function is not intrusive. The worker
// gets keys only for connections that its verified packets have made: the keys of their part and
// of the next. It runs beside the loop.
func (a *agent) endsOf(p plan.Proxy) func(stream.Ask) (*stream.Ends, error) {
	if !p.Stream.Intrusive {
		return nil
	}
	var mu sync.Mutex // a worker that drains asks beside the one that has its place
	var told time.Time
	return func(q stream.Ask) (ends *stream.Ends, err error) {
		defer func() {
			// A worker may send any number of requests; they must not fill the log.
			if err == nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if time.Since(told) > time.Second {
				told = time.Now()
				a.cfg.Log.Warn("a sealed connection has no key, and is reset", "function", p.Function, "client", q.Client, "server", q.Server, "err", err)
			}
		}()
		n := a.inForce.Load()
		if n == nil {
			return nil, errors.New("there is no plan in force")
		}
		path, err := a.dp.ConnectionPart(p.Function, q.Client, q.Server)
		if err != nil {
			return nil, err
		}
		return sealEnds(*n, p.Function, path, q, a.cfg.End, func(name string) (string, error) {
			text, _, err := gateway.Folder(a.cfg.GatewayFiles).Read(name, rootsMax)
			return string(text), err
		})
	}
}

// sealEnds are both ends of a function's connection, which came by a path; read reads files of origins' authorities.
func sealEnds(n plan.Node, function string, path uint32, q stream.Ask, own identities, read func(name string) (string, error)) (*stream.Ends, error) {
	var ends *stream.Ends
	for _, e := range n.Egresses {
		if e.Path != path || e.To != function || e.Direction != model.Forward || e.Seal == nil {
			continue
		}
		if q.Server != e.Seal.Origin || q.Client.Port() < e.Seal.Ports.First || q.Client.Port() > e.Seal.Ports.Last {
			return nil, fmt.Errorf("a connection from %s to %s is not one of chain %s, by whose path 0x%08x it came", q.Client, q.Server, e.Chain, path)
		}
		is, err := own.epochOf(e.PathID, e.Seal)
		if err != nil {
			return nil, err
		}
		if ends == nil {
			ends = &stream.Ends{From: seal.Part{Chain: e.Chain, Path: e.Path, Name: e.Seal.Name, Other: e.Seal.Peer}}
		} else if e.Seal.Name != ends.From.Name { // planned before the controller signed, or after that
			is.Name, is.Other = e.Seal.Name, e.Seal.Peer
		}
		ends.From.Epochs = append(ends.From.Epochs, is)
	}
	if ends == nil {
		return nil, fmt.Errorf("path 0x%08x is none of a sealed part that ends at function %s", path, function)
	}
	for _, h := range n.Headends {
		if h.From != function || h.Chain != ends.From.Chain || h.Direction != model.Forward || h.Seal == nil && len(h.Origins) == 0 {
			continue
		}
		if h.Seal != nil {
			to, err := own.partOf(h.PathID, h.Seal)
			ends.To = to
			return ends, err
		}
		for _, o := range h.Origins {
			roots, err := read(o.CA)
			if err != nil {
				return nil, fmt.Errorf("service %s: the authority of its origin: %w", o.Service, err)
			}
			ends.Origins = append(ends.Origins, stream.SealedOrigin{Service: o.Service, Roots: roots, Name: o.Name})
		}
		return ends, nil
	}
	return nil, fmt.Errorf("nothing says how chain %s goes on behind function %s", ends.From.Chain, function)
}
