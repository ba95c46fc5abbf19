package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
)

// Ends of a sealed chain under a controller make their keys themselves: the controller has none of them in its memory. The chain
// carries requests while secrets rotate, while the CA is replaced, and when agents start without the controller.
func TestEndsUnderAControllerHaveKeysOfTheirOwn(t *testing.T) {
	t.Parallel()
	domain := sealedDomain(t)
	s := newShopOf(t, domain, "[fc00:8::2]:443", func(c *lab.Config) { c.WithoutAgents = true })
	c := controlledIn(t, s.world)
	c.more = []string{"--gateway-files", s.folder}
	defer c.close()
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	c.must("apply", "-f", write(t, "domain.yaml", domain), "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	works := func(when string) {
		t.Helper()
		if got, want := s.curl("alice.pem", "1.1", "/files/"+sealMarker), "hello|5 200 1\n"; got != want {
			t.Fatalf("%s: curl prints %q; want %q", when, got, want)
		}
	}
	works("at first")
	f, err := s.function("r3", "dpi")
	must(t, err)
	if n := f.Stream; n.ToServer.In == 0 || n.PartMismatch+n.Unsealed+n.Peer+n.Untrusted+n.Expired+n.NoKey != 0 {
		t.Errorf("dpi has counted %+v", n)
	}

	keys := map[string][]byte{}
	for node, function := range map[string]string{"r1": "gateway", "r3": "dpi"} {
		var held api.HeldReaders
		r := run(t, "get", "readers", "deep", "--socket", agent.SocketPath(c.AgentDir(node)), "-o", "json")
		must(t, json.Unmarshal([]byte(r.stdout), &held))
		if len(held.Readers) != 1 || held.Readers[0].Key != "node" || held.Readers[0].CertificateEnds == nil || held.Readers[0].Function != function {
			t.Errorf("get readers of %s: %s", node, r)
		}
		var on struct{ Ends []struct{ Key []byte } }
		b, err := os.ReadFile(filepath.Join(c.AgentDir(node), "member", "ends.json"))
		must(t, err)
		must(t, json.Unmarshal(b, &on))
		if len(on.Ends) != 1 {
			t.Fatalf("%s has keys of %d ends; want 1", node, len(on.Ends))
		}
		keys[node] = on.Ends[0].Key
	}
	for node, key := range keys {
		if has, err := memoryHas(c.process.cmd.Process.Pid, key); err != nil || has {
			t.Errorf("the key of %s is in the controller's memory: %t, %v", node, has, err)
		}
		for other, a := range c.agents {
			if has, err := memoryHas(a.cmd.Process.Pid, key); err != nil || has != (other == node) {
				t.Errorf("the key of %s is in the memory of the agent of %s: %t, %v", node, other, has, err)
			}
		}
	}

	again := func(name string) {
		t.Helper()
		c.killAgent(name)
		c.agent(name, "")
		c.ready(name)
	}
	c.must("rotate", "--all", "--wait")
	works("after secrets have rotated")
	c.must("controller", "rotate-ca")
	works("while the CA is replaced")
	eventually(t, func() error {
		if r := c.must("get", "roots"); strings.Count(r.stdout, "\n") != 2 || !strings.Contains(r.stdout, "signs") {
			return fmt.Errorf("the CA is not replaced: %s", r)
		}
		return nil
	})
	again("r1") // whose gateway opens sessions anew
	works("after the CA was replaced")
	for node, key := range keys {
		b, err := os.ReadFile(filepath.Join(c.AgentDir(node), "member", "ends.json"))
		must(t, err)
		if text, err := json.Marshal(key); err != nil || bytes.Contains(b, text) {
			t.Errorf("%s has its end's key of before the CA was replaced", node)
		}
	}
	c.kill(&c.process)
	again("r1")
	again("r3")
	works("without a controller")
}

// The node of the gateway is revoked and joins again, and whoever has stolen the key and certificate of its end uses them, on the right
// path and with proofs of the new epoch: the function's worker refuses each session, and says why. With the certificate of after
// the revocation the same gateway is let in.
func TestAStolenEndIsRefusedAfterItsNodeWasRevoked(t *testing.T) {
	t.Parallel()
	domain := sealedDomain(t)
	s := newShopOf(t, domain, "[fc00:8::2]:443", func(c *lab.Config) { c.WithoutAgents = true })
	c := controlledIn(t, s.world)
	c.more = []string{"--gateway-files", s.folder}
	defer c.close()
	c.start()
	for _, name := range c.nodes() {
		c.agent(name, strings.TrimSpace(c.must("node", "token", name).stdout))
	}
	c.must("apply", "-f", write(t, "domain.yaml", domain), "--wait")
	for _, name := range c.nodes() {
		c.ready(name)
	}
	const path = "/files/" + sealMarker
	works := func(when string) {
		t.Helper()
		if got, want := s.curl("alice.pem", "1.1", path), "hello|5 200 1\n"; got != want {
			t.Fatalf("%s: curl prints %q; want %q", when, got, want)
		}
	}
	revoked := func() uint64 {
		t.Helper()
		f, err := s.function("r3", "dpi")
		must(t, err)
		return f.Stream.Revoked
	}
	works("at first")
	// The gateway keeps the connection to dpi, for the next request of the client.
	connections := func(n int) {
		t.Helper()
		eventually(t, func() error {
			r := run(t, "get", "streams", "dpi", "--connections", "--socket", agent.SocketPath(c.AgentDir("r3")), "-o", "json")
			var list struct{ Connections []json.RawMessage }
			if err := json.Unmarshal([]byte(r.stdout), &list); err != nil || len(list.Connections) != n {
				return fmt.Errorf("dpi has %d connections, want %d: %s %v", len(list.Connections), n, r, err)
			}
			return nil
		})
	}
	connections(1)
	member := filepath.Join(c.AgentDir("r1"), "member")
	ends := filepath.Join(member, "ends.json")
	stolen, err := os.ReadFile(ends)
	must(t, err)

	c.must("node", "revoke", "r1", "--yes")
	eventually(t, func() error {
		if r := c.must("get", "chains"); !strings.Contains(r.stdout, "its headend r1 was revoked") {
			return fmt.Errorf("the chain is not blocked: %s", r)
		}
		return nil
	})
	connections(0) // though the gateway has not ended it
	c.killAgent("r1")
	must(t, os.RemoveAll(member))
	c.agent("r1", strings.TrimSpace(c.must("node", "token", "r1", "--reinstate").stdout))
	c.ready("r1")
	eventually(t, func() error {
		if got, want := s.curl("alice.pem", "1.1", path), "hello|5 200 1\n"; got != want {
			return fmt.Errorf("the node has joined again: curl prints %q; want %q", got, want)
		}
		return nil
	})
	if n := revoked(); n != 0 {
		t.Errorf("dpi has refused %d sessions of the new certificate", n)
	}

	own, err := os.ReadFile(ends)
	must(t, err)
	if bytes.Equal(own, stolen) {
		t.Fatal("the end has the certificate of before")
	}
	// Without a controller nothing replaces the file.
	c.kill(&c.process)
	with := func(file []byte) {
		t.Helper()
		c.killAgent("r1")
		must(t, os.WriteFile(ends, file, 0o600))
		c.agent("r1", "")
		c.ready("r1")
	}
	s.mu.Lock()
	asked := len(s.seen)
	s.mu.Unlock()
	with(stolen)
	eventually(t, func() error {
		if got := s.curl("alice.pem", "1.1", path); !strings.Contains(got, " 502 ") {
			t.Errorf("with the stolen certificate curl prints %q; want 502", got)
		}
		f, err := s.function("r3", "dpi")
		if err == nil && f.Stream.Revoked == 0 {
			err = fmt.Errorf("dpi has refused no session as revoked: %+v", f.Stream)
		}
		return err
	})
	s.mu.Lock()
	if now := len(s.seen); now != asked {
		t.Errorf("the origin has got %d requests by the stolen certificate", now-asked)
	}
	s.mu.Unlock()
	with(own)
	works("with its own certificate again")
}

// memoryHas searches what a process can write to for some bytes.
func memoryHas(pid int, key []byte) (found bool, err error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return false, err
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false, err
	}
	defer mem.Close()
	searched := 0
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil {
			return false, err
		}
		if !strings.HasPrefix(rights, "rw") || to > math.MaxInt64 {
			continue
		}
		b := make([]byte, 1<<20)
		for at := from; at < to; at += uint64(len(b) - len(key)) { // parts overlap
			n, _ := mem.ReadAt(b[:min(uint64(len(b)), to-at)], int64(at))
			searched += n
			if bytes.Contains(b[:n], key) {
				return true, nil
			}
		}
	}
	if searched == 0 {
		return false, errors.New("nothing was searched")
	}
	return false, nil
}
