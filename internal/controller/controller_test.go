package controller

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// domain starts a controller with three agents that hold the file.
func domain(t *testing.T) (*world, map[string]*fake) {
	t.Helper()
	w := newWorld(t)
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	return w, agents
}

func TestOneFileInAndEachNodeHoldsItsPart(t *testing.T) {
	w, agents := domain(t)
	s := w.state()
	if len(s.Chains) != 1 || s.Chains[0].State != chainActive || len(s.Epochs) != 2 {
		t.Errorf("state %v", s)
	}
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r2", "r3"); n != 2 {
		t.Errorf("%d paths are sent into, want 2", n)
	}
	for _, n := range s.Nodes {
		if n.State != nodeReady {
			t.Errorf("node %v", n)
		}
	}
}

// epochsOf are the epochs of the forward path that a node holds in each role.
func epochsOf(n plan.Node, chain string) (sends, takes []uint8) {
	for _, h := range n.Headends {
		if h.Chain == chain {
			sends = append(sends, h.Epoch)
		}
	}
	for _, e := range n.Endpoints {
		if e.Chain == chain && e.Direction == 0 {
			takes = append(takes, e.Epoch)
		}
	}
	for _, e := range n.Egresses {
		if e.Chain == chain && e.Direction == 0 {
			takes = append(takes, e.Epoch)
		}
	}
	slices.Sort(takes)
	return sends, takes
}

func TestARotationGoesByItsSteps(t *testing.T) {
	w, agents := domain(t)
	agents["r2"].hush()
	serial := w.rotate()
	s := w.until("r2 is waited for", func(s *v1.State) bool {
		return s.Step == string(stepPrepare) && slices.Equal(s.WaitingFor, []string{"r2"})
	})
	if s.Settled || s.Since == nil {
		t.Errorf("state %v", s)
	}
	// Functions and egresses know the new epoch; no headend sends it.
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{1}) {
		t.Errorf("r1 sends %v before r2 knows", sends)
	}
	if _, takes := epochsOf(agents["r3"].now(), "web"); !slices.Equal(takes, []uint8{1, 2}) {
		t.Errorf("r3 takes %v", takes)
	}
	agents["r2"].speak()
	w.until("turned", settled(serial))
	w.until("drained", drained)
	for name, a := range agents {
		sends, takes := epochsOf(a.now(), "web")
		if slices.Contains(sends, 1) || slices.Contains(takes, 1) {
			t.Errorf("%s still holds epoch 1: sends %v, takes %v", name, sends, takes)
		}
		// Each step was a plan, and revisions only grow.
		last := uint64(0)
		for _, p := range a.plans() {
			if p.Revision <= last {
				t.Errorf("%s: revision %d behind %d", name, p.Revision, last)
			}
			last = p.Revision
		}
	}
	// In the store the old secrets are gone, too.
	snap, err := w.store.Snapshot(t.Context(), keyGenerations)
	w.must(err)
	if len(snap.Records) != 1 {
		t.Errorf("%d generations are kept", len(snap.Records))
	}
	all, err := w.store.Snapshot(t.Context(), "")
	w.must(err)
	gone := 0
	for name, a := range agents {
		has := secretsOf(a.now())
		for _, secret := range secretsOf(a.plans()[0]) {
			if slices.ContainsFunc(has, func(b []byte) bool { return bytes.Equal(b, secret) }) {
				continue
			}
			gone++
			for key, r := range all.Records {
				if bytes.Contains(r.Value, []byte(hex.EncodeToString(secret))) {
					t.Errorf("a secret that %s held is still in %s", name, key)
				}
			}
		}
	}
	if gone == 0 {
		t.Error("no node lost a secret")
	}
}

// secretsOf are all that a node's plan holds.
func secretsOf(n plan.Node) (all [][]byte) {
	for _, h := range n.Headends {
		all = append(all, h.Share.Key[:])
	}
	for _, e := range n.Endpoints {
		all = append(all, e.Share.Key[:])
	}
	for _, e := range n.Egresses {
		for _, k := range e.Verifier.Keys {
			all = append(all, k[:])
		}
	}
	return slices.DeleteFunc(all, func(b []byte) bool { return bytes.Equal(b, make([]byte, len(b))) })
}

func TestNobodyIsSentAnothersSecret(t *testing.T) {
	w, agents := domain(t)
	w.until("settled", settled(w.rotate()))
	w.until("drained", drained)
	searched, found := 0, 0
	for name, a := range agents {
		own := map[string]bool{}
		for _, p := range a.plans() {
			for _, s := range secretsOf(p) {
				own[string(s)] = true
			}
		}
		a.mu.Lock()
		wire := slices.Clone(a.wire.Bytes())
		a.mu.Unlock()
		searched += len(wire)
		in := func(s []byte) bool {
			for _, form := range []string{string(s), hex.EncodeToString(s), base64.StdEncoding.EncodeToString(s), base64.RawURLEncoding.EncodeToString(s)} {
				if bytes.Contains(bytes.ToLower(wire), bytes.ToLower([]byte(form))) {
					return true
				}
			}
			return false
		}
		for other, b := range agents {
			for _, p := range b.plans() {
				for _, s := range secretsOf(p) {
					switch {
					case other == name && !in(s):
						t.Errorf("the recorder of %s does not find its own secret: it finds nothing", name)
					case other == name:
						found++
					case !own[string(s)] && in(s):
						t.Errorf("%s was sent a secret of %s", name, other)
					}
				}
			}
		}
		// A function is not told the secrets of any other position, and no one the CA's key.
		if name == "r2" && len(own) != 4 { // one each way, in two epochs
			t.Errorf("r2 has %d secrets, want 4", len(own))
		}
		key, err := w.ctl.ca().Key()
		w.must(err)
		if in(key) {
			t.Errorf("%s was sent the key of the CA", name)
		}
	}
	if found == 0 {
		t.Error("no secret was sent at all")
	}
	t.Logf("%d bytes searched, %d times a node's own secret found", searched, found)
}

// try joins, and does no more.
func (f *fake) try(token, name string) error {
	m, err := member.Open(member.Config{Controllers: []string{f.w.listen}, Token: token, Dir: f.dir, Node: name, Now: f.w.now})
	if err != nil {
		return err
	}
	return m.Join(f.w.Context())
}

func TestATokenIsForOneNodeOnceAndForATime(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	w.now = func() time.Time { return now }
	w.start()
	try := func(token, name string) error {
		return (&fake{w: w, dir: t.TempDir()}).try(token, name)
	}
	used := w.token("r1")
	w.must(try(used, "r1"))
	if err := try(used, "r1"); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "not valid") {
		t.Errorf("a token that was used: %v", err)
	}
	other := w.token("r2")
	if err := try(other, "r1"); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "for another node than r1") {
		t.Errorf("another's token: %v", err)
	}
	w.must(try(other, "r2")) // and it is still good for its own
	late := w.token("r3")
	now = now.Add(tokenValid + time.Second)
	if err := try(late, "r3"); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "not valid") {
		t.Errorf("an expired token: %v", err)
	}
	forged, err := identity.NewToken(w.ctl.ca().Pin())
	w.must(err)
	if err := try(forged.Text(), "r1"); code(err) != connect.CodePermissionDenied {
		t.Errorf("a token that nobody made: %v", err)
	}
	foreign, err := identity.NewCA("waystamp", now)
	w.must(err)
	pinned, err := identity.NewToken(foreign.Pin())
	w.must(err)
	if err := try(pinned.Text(), "r1"); err == nil || !strings.Contains(err.Error(), "another pin") {
		t.Errorf("a token of another controller: %v", err)
	}
	// What the store keeps is not the token.
	parsed, err := identity.ParseToken(w.token("r9"))
	w.must(err)
	snap, err := w.store.Snapshot(t.Context(), "")
	w.must(err)
	for key, r := range snap.Records {
		if strings.Contains(key, parsed.Secret) || bytes.Contains(r.Value, []byte(parsed.Secret)) {
			t.Errorf("the record %s holds the token", key)
		}
	}
}

func TestACertificateOfAnotherKeyOrTimeIsRefused(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	w.now = func() time.Time { return now }
	w.start()
	first := &fake{w: w, name: "r1", dir: t.TempDir()}
	w.must(first.try(w.token("r1"), "r1"))
	call := func(f *fake) error {
		m, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: f.dir, Node: "r1", Now: w.now})
		w.must(err)
		return m.Call(t.Context())
	}
	w.must(call(first))
	// It was away for longer than its certificate: it may renew it, and nothing else.
	now = now.Add(identity.CertificateValid + time.Hour)
	if err := call(first); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "has expired") {
		t.Errorf("with an expired certificate: %v", err)
	}
	m, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: first.dir, Node: "r1", Now: w.now})
	w.must(err)
	w.must(m.Renew(t.Context()))
	w.must(call(first))
	// For longer than that, and it joins like a new one.
	now = now.Add(identity.CertificateValid + identity.LateMax - time.Hour)
	w.must(m.Renew(t.Context()))
	now = now.Add(identity.CertificateValid + identity.LateMax + time.Hour)
	if err := m.Renew(t.Context()); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "more than 90 days ago") {
		t.Errorf("with a certificate that expired long ago: %v", err)
	}
	w.must(first.try(w.token("r1"), "r1"))
	w.must(call(first))
	// Another machine joins under its name.
	second := &fake{w: w, name: "r1", dir: t.TempDir()}
	w.must(second.try(w.token("r1"), "r1"))
	w.must(call(second))
	if err := call(first); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "another key") {
		t.Errorf("the machine before: %v", err)
	}
}

func TestARevokedNodeIsOut(t *testing.T) {
	w, agents := domain(t)
	secrets := secretsOf(agents["r2"].now())
	r, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)
	if !slices.Equal(r.Msg.Blocked, []string{"web"}) {
		t.Errorf("blocked %v", r.Msg.Blocked)
	}
	s := w.until("blocked", func(s *v1.State) bool { return drained(s) && s.Chains[0].State == chainBlocked })
	if want := "its function fw is on node r2, which was revoked"; s.Chains[0].Reason != want {
		t.Errorf("web is %v, want %q", s.Chains[0], want)
	}
	// The egress still requires proofs, under secrets that r2 never had.
	e := agents["r3"].now().Egresses
	if len(e) != 1 || e[0].Epoch != 2 || len(agents["r1"].now().Headends) != 0 {
		t.Errorf("r3 ends %v, r1 starts %v", e, agents["r1"].now().Headends)
	}
	for _, s := range secrets {
		for _, k := range e[0].Verifier.Keys {
			if bytes.Equal(s, k[:]) {
				t.Error("r3 still takes what r2 stamps")
			}
		}
	}
	if n := len(agents["r2"].plans()); agents["r2"].plans()[n-1].Endpoints[0].Epoch != 1 {
		t.Error("r2 was sent another plan")
	}
	m, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: agents["r2"].dir})
	w.must(err)
	for what, err := range map[string]error{"calls": m.Call(t.Context()), "renews": m.Renew(t.Context())} {
		if code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "was revoked") {
			t.Errorf("r2 %s: %v", what, err)
		}
	}
	if _, err := w.admin.CreateToken(t.Context(), connect.NewRequest(&v1.CreateTokenRequest{Node: "r2"})); code(err) != connect.CodeFailedPrecondition {
		t.Errorf("a token for it: %v", err)
	}
	// The function moves to a spare node, and traffic flows again.
	w.join("r4")
	spare := `  - {name: r4, address: "fc00:4::1", locator: "fc00:0:0:400::/56", cpus: 2, interfaces: [{name: r4-r2, role: core}]}` + "\nfunctions:\n"
	s = w.until("moved", settled(w.apply(edit(file, "functions:\n  - {name: fw, node: r2", spare+"  - {name: fw, node: r4"))))
	if s.Chains[0].State != chainActive || len(agents["r1"].now().Headends) != 1 {
		t.Errorf("web is %v", s.Chains[0])
	}
	// A machine that was set up anew may come back under the name.
	again, err := w.admin.CreateToken(t.Context(), connect.NewRequest(&v1.CreateTokenRequest{Node: "r2", Reinstate: true}))
	w.must(err)
	if err := (&fake{w: w, dir: t.TempDir()}).try(again.Msg.Token, "r2"); err != nil {
		t.Error(err)
	}
	if err := m.Call(t.Context()); code(err) != connect.CodePermissionDenied {
		t.Errorf("the revoked key: %v", err)
	}
}

func TestARevocationDoesNotWaitForAChange(t *testing.T) {
	w, agents := domain(t)
	agents["r2"].hush()
	w.rotate()
	w.until("r2 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)
	w.until("blocked", func(s *v1.State) bool { return drained(s) && s.Chains[0].State == chainBlocked })
	// Epoch 2 was prepared with secrets of which r2 had one: its number is used up.
	if e := agents["r3"].now().Egresses; len(e) != 1 || e[0].Epoch != 3 {
		t.Errorf("r3 ends %v", e)
	}
	verifiers := map[uint8]string{}
	for _, p := range agents["r3"].plans() {
		for _, e := range p.Egresses {
			var keys []byte
			for _, k := range e.Verifier.Keys {
				keys = append(keys, k[:]...)
			}
			if was, ok := verifiers[e.Epoch]; ok && was != string(keys) {
				t.Errorf("epoch %d of %s had two secrets", e.Epoch, e.PathID)
			}
			verifiers[e.Epoch] = string(keys)
		}
	}
	if len(verifiers) != 3 {
		t.Errorf("r3 held %d epochs, want 3", len(verifiers))
	}
}

// twoChains is a domain whose chain web needs r2 and whose chain mail does not.
var twoChains = edit(file,
	"functions:\n", `  - {name: r5, address: "fc00:5::1", locator: "fc00:0:0:500::/56", cpus: 2, interfaces: [{name: r5-r1, role: core}, {name: r5-r3, role: core}]}`+
		"\nfunctions:\n  - {name: av, node: r5, kind: forward}\n",
	", direction: both", "") +
	`  - {name: mail, ingress: [r1], functions: [av], egress: r3, match: {destination: "2001:db8:25::/48"}}` + "\n"

// A node is away, and a change waits for it. Another one is revoked meanwhile: what that one was on gets
// fresh secrets at once, and chains that it was not on lose no packet.
func TestARevocationInTheMidstOfAChangeLeavesOtherChainsAlone(t *testing.T) {
	for _, c := range []struct {
		away string // what the change waits for
		step step
	}{{"r5", stepPrepare}, {"r1", stepTurn}} {
		t.Run(string(c.step), func(t *testing.T) {
			w := newWorld(t)
			w.drain = time.Second
			w.start()
			agents := map[string]*fake{}
			names := []string{"r1", "r2", "r3", "r5"}
			for _, name := range names {
				agents[name] = w.join(name)
			}
			w.until("settled", settled(w.apply(twoChains)))
			agents[c.away].stop()
			serial := w.rotate()
			waits := func(s *v1.State) bool {
				return s.Step == string(c.step) && slices.Equal(s.WaitingFor, []string{c.away})
			}
			w.until(c.away+" is waited for", waits)
			_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
			w.must(err)
			chain := func(s *v1.State, name string) string {
				return s.Chains[slices.IndexFunc(s.Chains, func(ch *v1.ChainState) bool { return ch.Name == name })].State
			}
			w.until("r2 is out", func(s *v1.State) bool {
				return chain(s, "web") == chainBlocked && waits(s) && nodeIn(s, "r3").State == nodeReady
			})
			// No secret of web that r2 had is good for anything.
			if _, takes := epochsOf(agents["r3"].now(), "web"); !slices.Equal(takes, []uint8{3}) {
				t.Errorf("r3 takes epochs %v of web, want 3", takes)
			}
			// What r1 sends of mail is taken all the way, as it was before.
			sends, _ := epochsOf(agents["r1"].now(), "mail")
			if !slices.Equal(sends, []uint8{1}) {
				t.Errorf("r1 sends epochs %v of mail, want 1: the change has not ended", sends)
			}
			for _, name := range []string{"r3", "r5"} {
				if _, takes := epochsOf(agents[name].now(), "mail"); !slices.Contains(takes, 1) {
					t.Errorf("%s takes epochs %v of mail, and r1 sends 1", name, takes)
				}
			}
			agents[c.away].run("")
			s := w.until("settled", settled(serial))
			if chain(s, "mail") != chainActive || chain(s, "web") != chainBlocked {
				t.Errorf("chains %v", s.Chains)
			}
			w.until("drained", drained)
			if sends, _ := epochsOf(agents["r1"].now(), "mail"); !slices.Equal(sends, []uint8{2}) {
				t.Errorf("r1 sends epochs %v of mail, want 2", sends)
			}
			at := func(name string) plan.Node { return agents[name].now() }
			if n := w.accepted(at, "r1", "r3", "r5"); n != 1 {
				t.Errorf("%d paths are sent into, want that of mail", n)
			}
			oneSecretEach(t, agents)
			// The epochs that were given up are forgotten in the end, and a chain turns again.
			w.until("rotated", settled(w.rotate()))
		})
	}
}

// A chain that comes with the change goes on to come without the node.
func TestARevocationInTheMidstOfAChangeIsOfTheChainsThatComeToo(t *testing.T) {
	w, agents := domain(t)
	r5 := w.join("r5")
	agents["r5"] = r5
	r5.hush()
	// web moves to r5, and a chain comes that passes r2.
	next := edit(twoChains, "{name: fw, node: r2, kind: forward}", "{name: fw, node: r5, kind: forward}", "{name: av, node: r5, kind: forward}", "{name: av, node: r2, kind: forward}",
		"egress: r3, match: {destination: \"2001:db8:3::/48\"}", "egress: r3, direction: both, match: {destination: \"2001:db8:3::/48\"}")
	serial := w.apply(next)
	w.until("r5 is waited for", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r5"}) })
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)
	w.until("web is blocked", func(s *v1.State) bool {
		return s.Chains[0].State == chainBlocked && nodeIn(s, "r1").State == nodeReady && nodeIn(s, "r3").State == nodeReady
	})
	if len(agents["r1"].now().Headends) != 0 {
		t.Errorf("r1 starts %v", agents["r1"].now().Headends)
	}
	r5.speak()
	s := w.until("settled", settled(serial))
	if len(s.Chains) != 2 || s.Chains[0].State != chainActive || s.Chains[1].State != chainBlocked {
		t.Errorf("chains %v; want web on r5, and mail blocked", s.Chains)
	}
	w.until("drained", drained)
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r3", "r5"); n != 2 {
		t.Errorf("%d paths are sent into, want those of web", n)
	}
	oneSecretEach(t, agents)
}

// oneSecretEach holds that no epoch's number was used under two secrets, by what agents were sent.
func oneSecretEach(t *testing.T, agents map[string]*fake) {
	t.Helper()
	secrets := map[string]string{} // by path, epoch and position
	for name, a := range agents {
		for _, p := range a.plans() {
			hold := func(id plan.PathID, position int, key []byte) {
				at := fmt.Sprint(id.Path, " epoch ", id.Epoch, " position ", position)
				if was, ok := secrets[at]; ok && was != string(key) {
					t.Errorf("%s: %s: %s has two secrets", name, id, at)
				}
				secrets[at] = string(key)
			}
			for _, h := range p.Headends {
				hold(h.PathID, 0, h.Share.Key[:])
			}
			for _, e := range p.Endpoints {
				hold(e.PathID, int(e.Share.Position), e.Share.Key[:])
			}
			for _, e := range p.Egresses {
				for i, k := range e.Verifier.Keys {
					hold(e.PathID, i, k[:])
				}
			}
		}
	}
	if len(secrets) == 0 {
		t.Error("no agent was sent a secret")
	}
}

func TestAChainIsBlockedThatCannotBeWithoutTheNode(t *testing.T) {
	domain := func() *model.Domain {
		return &model.Domain{
			Functions: []model.Function{{Name: "fw", Node: "b"}},
			Chains:    []model.Chain{{Name: "web", Ingress: []string{"a", "d"}, Functions: []string{"fw"}, Egress: "c"}},
		}
	}
	for _, c := range []struct {
		revoked []string
		why     string
		ingress []string
	}{
		{nil, "", []string{"a", "d"}},
		{[]string{"x"}, "", []string{"a", "d"}},
		{[]string{"a"}, "", []string{"d"}},
		{[]string{"a", "d"}, "its headend a, d was revoked", []string{"a", "d"}},
		{[]string{"b"}, "its function fw is on node b, which was revoked", []string{"a", "d"}},
		{[]string{"c"}, "its egress c was revoked", []string{"a", "d"}},
	} {
		d := domain()
		if blocked := block(d, c.revoked); blocked["web"] != c.why || !slices.Equal(d.Chains[0].Ingress, c.ingress) {
			t.Errorf("without %v: blocked %q, headends %v; want %q and %v", c.revoked, blocked["web"], d.Chains[0].Ingress, c.why, c.ingress)
		}
	}
}

// A chain with several headends goes on without one of them.
func TestAHeadendThatWasRevokedIsTakenOff(t *testing.T) {
	w := newWorld(t)
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3", "r5"} {
		agents[name] = w.join(name)
	}
	two := edit(file, "functions:\n", `  - {name: r5, address: "fc00:5::1", locator: "fc00:0:0:500::/56", cpus: 2, interfaces: [{name: r5-h5, role: edge}, {name: r5-r2, role: core}]}`+"\nfunctions:\n",
		"ingress: [r1]", "ingress: [r1, r5]", ", direction: both", "")
	w.until("settled", settled(w.apply(two)))
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r5"}))
	w.must(err)
	s := w.until("out", func(s *v1.State) bool { return drained(s) && len(agents["r3"].now().Egresses[0].Sources) == 1 })
	if s.Chains[0].State != chainActive {
		t.Errorf("web is %v", s.Chains[0])
	}
	at := func(name string) plan.Node { return agents[name].now() }
	if n := w.accepted(at, "r1", "r2", "r3"); n != 1 {
		t.Errorf("%d headends send", n)
	}
	if e := agents["r3"].now().Egresses[0]; e.Epoch != 2 {
		t.Errorf("epoch %d, want 2", e.Epoch)
	}
}

func TestALowerRevisionIsRefused(t *testing.T) {
	w, agents := domain(t)
	w.stop()
	old := readFile(t, filepath.Join(w.dir, "store"))
	w.start()
	w.until("settled", settled(w.rotate()))
	w.until("drained", drained)
	held := agents["r2"].now()
	w.stop()
	// A controller from a backup knows nothing of the last change.
	writeFile(t, filepath.Join(w.dir, "store"), old)
	w.start()
	s := w.until("r2 refuses", func(s *v1.State) bool {
		return slices.ContainsFunc(s.Nodes, func(n *v1.NodeState) bool { return n.Name == "r2" && n.State == nodeRefusing })
	})
	for _, n := range s.Nodes {
		if n.Name == "r2" && !strings.Contains(n.Reason, "the last that this controller made") && !strings.Contains(n.Reason, "older than the plan on this node's disk") {
			t.Errorf("r2: %v", n)
		}
	}
	if now := agents["r2"].now(); now.Revision != held.Revision {
		t.Errorf("r2 holds revision %d, and held %d", now.Revision, held.Revision)
	}
	var onDisk plan.Node
	b := readFile(t, filepath.Join(agents["r2"].dir, "plan.json"))
	if onDisk, _ = plan.DecodeNode(b); onDisk.Revision != held.Revision {
		t.Errorf("on disk is revision %d", onDisk.Revision)
	}
}

// A controller dies before or behind each of its commits, and the next one goes on from the
// records: the nodes come to the same plans, no number is used under two secrets, and whatever is
// sent is taken.
func TestAControllerThatDiesGoesOnFromItsRecords(t *testing.T) {
	reached := 0
	for at := 1; ; at++ {
		ended := false
		for _, behind := range []bool{false, true} {
			t.Run(fmt.Sprintf("commit %d, behind it %v", at, behind), func(t *testing.T) {
				w, agents := domain(t)
				w.stop()
				var d *dying
				w.wrap = func(s store.Store) store.Store {
					d = &dying{Store: s, at: at, behind: behind, dead: make(chan struct{})}
					return d
				}
				w.start()
				ctl := w.ctl
				// It may die of the request.
				_, err := w.admin.Rotate(t.Context(), connect.NewRequest(&v1.RotateRequest{All: true}))
				t.Logf("rotate: %v", err)
				lived := make(chan struct{})
				ctx, cancel := context.WithCancel(t.Context())
				watched := make(chan error, 1)
				done := sync.OnceFunc(func() { close(lived) })
				go func() {
					watched <- ctl.watch(ctx, keyControl, func() {
						if s, err := ctl.describe(ctx); err == nil && drained(s) && s.Serial == 2 && nothingToErase(ctl) {
							done()
						}
					})
				}()
				select {
				case <-d.dead:
					reached++
				case <-lived:
					ended = true
				case <-time.After(patience):
					t.Error("it neither dies nor ends")
				}
				cancel()
				<-watched
				w.stop()
				w.wrap = nil
				w.start()
				serial := w.state().WantedSerial
				if serial < 2 {
					serial = w.rotate() // it died before the request was a record
				}
				w.until("settled", settled(serial))
				w.until("drained", drained)
				at := func(name string) plan.Node { return agents[name].now() }
				if n := w.accepted(at, "r1", "r2", "r3"); n != 2 {
					t.Errorf("%d paths are sent into", n)
				}
				secrets := map[string]string{} // by node, position and epoch
				for name, a := range agents {
					for _, p := range a.plans() {
						for _, e := range p.Endpoints {
							id := fmt.Sprint(name, e.SID, e.Path, e.Epoch)
							if was, ok := secrets[id]; ok && was != string(e.Share.Key[:]) {
								t.Errorf("%s: epoch %d of %s had two secrets", name, e.Epoch, e.PathID)
							}
							secrets[id] = string(e.Share.Key[:])
						}
					}
				}
			})
		}
		if ended || t.Failed() {
			break
		}
	}
	if reached < 2*4 {
		t.Errorf("it died %d times; a change has more commits", reached)
	}
}

func nothingToErase(c *Controller) bool {
	var s stateRecord
	return c.record(bg, keyState, &s) == nil && len(s.Erasing) == 0 && len(s.Old) == 0
}

func TestWhatIsWrongWithAFileIsSaidAndChangesNothing(t *testing.T) {
	w, _ := domain(t)
	before := w.state()
	for name, c := range map[string]struct{ text, says string }{
		"a field that is none":      {edit(file, "ingress: [r1]", "ingres: [r1]"), "ingres"},
		"a chain that does not fit": {edit(file, "functions: [fw]", "functions: [fw, dpi]"), "dpi"},
		"an address that moves":     {edit(file, "fc00:2::1", "fc00:22::1"), "its address, its locator or the block changes"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.admin.Apply(t.Context(), connect.NewRequest(&v1.ApplyRequest{File: &v1.File{Name: "x.yaml", Source: []byte(c.text)}}))
			if code(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
	if after := w.state(); after.WantedSerial != before.WantedSerial || after.Serial != before.Serial {
		t.Errorf("serial %d, was %d", after.WantedSerial, before.WantedSerial)
	}
}

func TestDifferencesAreNamed(t *testing.T) {
	w, _ := domain(t)
	diff := func(text string) (out []string) {
		r, err := w.admin.Diff(t.Context(), connect.NewRequest(&v1.DiffRequest{File: &v1.File{Name: "x.yaml", Source: []byte(text)}}))
		w.must(err)
		for _, d := range r.Msg.Differences {
			out = append(out, d.Kind+" "+d.Name+" "+d.Change)
		}
		return out
	}
	if d := diff(file + "# a comment\n"); len(d) != 0 {
		t.Errorf("differences %v", d)
	}
	if d := diff(edit(file, "name: web", "name: mail", "{name: fw, node: r2", "{name: fw, node: r3")); !slices.Equal(d, []string{"function fw changed", "chain mail added", "chain web removed"}) {
		t.Errorf("differences %v", d)
	}
	_, err := w.admin.Delete(t.Context(), connect.NewRequest(&v1.DeleteRequest{Chain: "web"}))
	w.must(err)
	if d := diff(file); !slices.Equal(d, []string{"chain web added"}) {
		t.Errorf("differences %v", d)
	}
	s := w.until("gone", func(s *v1.State) bool { return drained(s) && len(s.Chains) == 0 })
	if len(s.Epochs) != 0 {
		t.Errorf("epochs %v", s.Epochs)
	}
}

// A rule that changes is a change of the domain, and where it stands in the file is none.
func TestServicesAreDifferencesToo(t *testing.T) {
	w, _ := domain(t)
	diff := func(text string) (out []string) {
		r, err := w.admin.Diff(t.Context(), connect.NewRequest(&v1.DiffRequest{File: &v1.File{Name: "x.yaml", Source: []byte(text)}}))
		w.must(err)
		for _, d := range r.Msg.Differences {
			out = append(out, d.Kind+" "+d.Name+" "+d.Change)
		}
		return out
	}
	const rule = `{who: "**", path: /a, chain: light}`
	served := file + `  - {name: light, ingress: [r1], functions: [fw], egress: r3, direction: both}
clients:
  - {name: staff, ca: ca.pem, identity: {spiffe: staff.example}, revocation: {lifetime: 1h}}
services:
  - name: shop
    hosts: [shop.example.org]
    gateway: {nodes: [r1], address: "[2001:db8:7::2]:443"}
    certificate: {file: shop.pem, key: shop.key}
    clients: staff
    origin: {address: "[2001:db8:7::2]:443", tls: {ca: origin.pem, name: shop.internal}}
    rules: [` + rule + `]
`
	if d := diff(served); !slices.Equal(d, []string{"chain light added", "clients staff added", "service shop added"}) {
		t.Errorf("differences %v", d)
	}
	w.until("served", settled(w.apply(served)))
	if d := diff(edit(served, "clients:\n", "# a comment\nclients:\n")); len(d) != 0 {
		t.Errorf("differences %v", d)
	}
	if d := diff(edit(served, "path: /a", "path: /b")); !slices.Equal(d, []string{"service shop changed"}) {
		t.Errorf("differences %v", d)
	}
	_, err := w.admin.Delete(t.Context(), connect.NewRequest(&v1.DeleteRequest{Chain: "light"}))
	if code(err) != connect.CodeFailedPrecondition || !strings.Contains(err.Error(), "a rule of service shop names chain light") {
		t.Errorf("a chain that a rule names is deleted: %v", err)
	}
}

func TestOnlyOperatorsCallTheSocketAndOnlyNodesTheOthers(t *testing.T) {
	w := newWorld(t)
	w.admins = func(uint32) bool { return false }
	w.start()
	if _, err := w.admin.Get(t.Context(), connect.NewRequest(&v1.GetRequest{})); code(err) != connect.CodePermissionDenied {
		t.Errorf("a user who is no operator: %v", err)
	}
	// Without a certificate, but for Join.
	m := &fake{w: w, dir: t.TempDir()}
	token, err := identity.NewToken(w.ctl.ca().Pin())
	w.must(err)
	if err := m.try(token.Text(), ""); code(err) != connect.CodePermissionDenied {
		t.Errorf("join: %v", err)
	}
}

func TestAStoreBelongsToItsTrustDomain(t *testing.T) {
	w := newWorld(t)
	w.start()
	root := w.ctl.ca().Root()
	w.stop()
	bolt, err := store.OpenBolt(filepath.Join(w.dir, "store"))
	w.must(err)
	defer bolt.Close()
	c, err := New(t.Context(), Config{Store: bolt})
	if err != nil || !bytes.Equal(c.ca().Root(), root) {
		t.Errorf("the CA is another one: %v", err)
	}
	if _, err := New(t.Context(), Config{Store: bolt, TrustDomain: "example.org"}); err == nil || !strings.Contains(err.Error(), "belongs to the trust domain waystamp") {
		t.Errorf("got %v", err)
	}
}

// A chain that is deleted and comes back begins with its first epoch, when nobody holds a later one any
// more.
func TestAChainThatComesBackWaitsUntilItIsGone(t *testing.T) {
	w, _ := domain(t)
	w.until("settled", settled(w.rotate()))
	_, err := w.admin.Delete(t.Context(), connect.NewRequest(&v1.DeleteRequest{Chain: "web"}))
	w.must(err)
	w.until("deleted", func(s *v1.State) bool { return s.Settled && len(s.Chains) == 0 })
	w.until("back", settled(w.apply(file)))
	s := w.until("drained", drained)
	if len(s.Epochs) != 2 || s.Epochs[0].Epoch != 1 {
		t.Errorf("epochs %v", s.Epochs)
	}
}

// What is asked for in the midst of a change comes behind it, as one.
func TestRequestsInTheMidstOfAChangeAreOneBehindIt(t *testing.T) {
	w, agents := domain(t)
	agents["r2"].hush()
	w.rotate()
	w.until("the first is begun", func(s *v1.State) bool { return slices.Equal(s.WaitingFor, []string{"r2"}) })
	for range 5 {
		w.rotate()
	}
	last := w.rotate()
	agents["r2"].speak()
	w.until("settled", settled(last))
	w.until("drained", drained)
	if sends, _ := epochsOf(agents["r1"].now(), "web"); !slices.Equal(sends, []uint8{3}) {
		t.Errorf("r1 sends %v, want epoch 3: the first request's, and that of all others", sends)
	}
}

func TestAnEpochIsNotGivenOutAgainWhileANodeMayHoldIt(t *testing.T) {
	held := map[pathEpoch]bool{{7, 2}: true}
	path := func(epoch uint8) *plan.Domain {
		return &plan.Domain{Paths: []plan.Path{{PathID: plan.PathID{Path: 7, Epoch: epoch, Chain: "web"}}}}
	}
	may := func(last, next *plan.Domain, s stateRecord) error {
		turning, lossy := last.Turning(next)
		return mayHave(next, turning, lossy, s, held)
	}
	if err := may(path(1), path(2), stateRecord{}); !errors.Is(err, errWait) {
		t.Errorf("got %v", err)
	}
	if err := may(path(1), path(3), stateRecord{}); err != nil {
		t.Error(err)
	}
	if err := may(path(2), path(2), stateRecord{}); err != nil {
		t.Errorf("a path that does not change: %v", err)
	}
	if err := may(&plan.Domain{}, path(1), stateRecord{}); !errors.Is(err, errWait) {
		t.Errorf("a path that comes back: %v", err)
	}
	if err := may(path(2), &plan.Domain{}, stateRecord{}); err != nil {
		t.Errorf("a path that goes: %v", err)
	}
	if err := may(path(1), path(3), stateRecord{Old: make([]oldRecord, OldMax)}); !errors.Is(err, errWait) {
		t.Errorf("got %v", err)
	}
}

// What people and logs see of the state has no secrets.
func TestTheStateHasNoSecrets(t *testing.T) {
	w, agents := domain(t)
	b, err := json.Marshal(w.state())
	w.must(err)
	for _, a := range agents {
		for _, s := range secretsOf(a.now()) {
			if bytes.Contains(b, []byte(hex.EncodeToString(s))) || bytes.Contains(b, []byte(base64.StdEncoding.EncodeToString(s))) {
				t.Fatal("the state has a secret")
			}
		}
	}
}

// forgetful is a store that cannot be read below a prefix.
type forgetful struct {
	store.Store
	mu      sync.Mutex
	prefix  string // "": all can be read
	refused chan struct{}
}

func (f *forgetful) Snapshot(ctx context.Context, prefix string) (store.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.prefix != "" && strings.HasPrefix(prefix, f.prefix) {
		notify(f.refused)
		return store.Snapshot{}, &store.Failure{Did: "read", Err: errors.New("the disk is broken")}
	}
	return f.Store.Snapshot(ctx, prefix)
}

func (f *forgetful) set(prefix string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prefix = prefix
}

// A generation's number is somebody's when it is committed: until then another controller may give it to another.
func TestWhatWasNotCommittedIsNotRemembered(t *testing.T) {
	w := newWorld(t)
	var disk *forgetful
	w.wrap = func(s store.Store) store.Store {
		disk = &forgetful{Store: s, refused: make(chan struct{}, 1)}
		return disk
	}
	w.start()
	for _, name := range []string{"r1", "r2", "r3"} {
		w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	w.until("settled", settled(w.apply(edit(file, `  - {name: r2, address: "fc00:2::1", locator: "fc00:0:0:200::/56", cpus: 2, interfaces: [{name: r2-r1, role: core}, {name: r2-r3, role: core}]}`+"\n", "",
		"  - {name: fw, node: r2, kind: forward}", "  - {name: fw, node: r1, kind: forward}"))))
	w.until("drained", drained)
	// What r2 shall hold, which has left, is made of what it held.
	disk.set(keyPlans + "r2")
	serial := w.rotate()
	select {
	case <-disk.refused:
	case <-time.After(patience):
		t.Fatal("r2's plan was not read")
	}
	v, err := readView(t.Context(), w.store)
	w.must(err)
	w.ctl.cache.Lock()
	for n := range w.ctl.cache.generations {
		if !slices.Contains(v.state.live(), n) {
			t.Errorf("generation %d is remembered; those of the store are %v", n, v.state.live())
		}
	}
	w.ctl.cache.Unlock()
	disk.set("")
	w.until("settled", settled(serial))
}
