package e2e

import (
	"crypto/rand"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/srv6"
)

// guards gives all chains one.
func guards(g model.Guard) change {
	return func(m *manifest.Manifest) {
		for i := range m.Domain.Chains {
			m.Domain.Chains[i].Guard = g
		}
	}
}

// The same packets without a proof are counted by audit as enforce counts them, once
// each, and what has a proof gets through whatever the guard says.
func TestAuditCountsWhatEnforceRefuses(t *testing.T) {
	t.Parallel()
	alsoOverLabels(t, auditCountsWhatEnforceRefuses)
}

func auditCountsWhatEnforceRefuses(t *testing.T, carried change) {
	w := build(t, star, guards(model.GuardAudit), carried)
	m, h2 := w.meddle("m"), w.capture("h2", "h2-r6")
	from := netip.MustParseAddr("fc00:7::66")
	plain := func() {
		for range probes {
			m.send(srv6.Packet{
				Header:  srv6.Header{NextHeader: unix.IPPROTO_NONE, HopLimit: 9, Source: from, Destination: w.addr("h2")},
				Payload: []byte("nothing"),
			})
		}
	}
	arrived := func(want int) {
		t.Helper()
		eventually(t, func() error {
			if n := h2.from(from); n != want {
				return fmt.Errorf("h2 has got %d packets without a proof, want %d", n, want)
			}
			return nil
		})
	}
	warned := func(want bool) {
		t.Helper()
		for _, n := range []string{"r1", "r6"} {
			eventually(t, func() error {
				all := w.status(n).Warnings
				is := slices.ContainsFunc(all, func(s string) bool { return strings.HasPrefix(s, "guard: audit of chain web, ") })
				if is != want {
					return fmt.Errorf("%s warns of an audited guard: %t, want %t: %q", n, is, want, all)
				}
				return nil
			})
		}
	}
	follow := func(g model.Guard) {
		t.Helper()
		d := w.manifest.Domain
		d.Chains = slices.Clone(d.Chains)
		for i := range d.Chains {
			d.Chains[i].Guard = g
		}
		next, err := plan.Compile(d, plan.NewKeyring(rand.Reader, w.plan.Paths))
		must(t, err)
		for _, n := range next.Nodes {
			w.follow(n)
		}
	}

	warned(true)
	since := time.Now()
	plain()
	w.reported("r6", "unproven", probes) // and nothing is unverified
	arrived(probes)
	e := w.event(since, "r6", "unproven")
	w.explained(e, "a packet from fc00:7::66 to fc00:8::2, which chain web requires, came without proof")
	if !e.Reported {
		t.Error("the event does not say that the packet was let go on")
	}
	w.reaches("h1", "h2")

	follow(model.GuardEnforce)
	warned(false)
	plain()
	w.refused("r6", "unproven", probes)
	w.reaches("h1", "h2")
	follow(model.GuardOff)
	plain()
	arrived(2 * probes) // of three times as many
	w.reaches("h1", "h2")
	w.checkRefusals()
}
