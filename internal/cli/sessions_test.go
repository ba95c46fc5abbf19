package cli

import (
	"encoding/json"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/model"
)

// withGateway is an agent of a node with a gateway.
func withGateway(node string) *fakeClient {
	at := netip.MustParseAddrPort("[fc00:7::2]:40000")
	return &fakeClient{
		services: api.Services{Version: api.Version, Node: node, Services: []api.Service{{Name: "shop"}}, Refused: []api.GatewayRefusal{{Reason: "rule-none", Count: 3}}},
		sessions: api.Sessions{Version: api.Version, Node: node, Sessions: []api.Session{
			{ID: 4, Service: "shop", Identity: "spiffe://staff.example/sales/bob", Client: at, Requests: 2, Chains: []string{"light", "scan"}},
			{ID: 7, Service: "shop", Identity: "spiffe://staff.example/ops/alice", Client: at},
		}},
	}
}

func TestGetSessionsOfOneIdentity(t *testing.T) {
	agents := fakeAgents{"/1": withGateway("r1")}
	out, _, code := agents.run(t, t.Context(), "get", "sessions", "--socket", "/1")
	if code != command.ExitDone || !strings.Contains(out, "sales/bob") || !strings.Contains(out, "light,scan") || !strings.Contains(out, "ops/alice") {
		t.Errorf("exit code %d:\n%s", code, out)
	}
	out, _, code = withGatewayAt("/1").run(t, t.Context(), "get", "sessions", "--socket", "/1", "--identity", "spiffe://staff.example/ops/alice", "-o", "json")
	var v api.Sessions
	if err := json.Unmarshal([]byte(out), &v); code != command.ExitDone || err != nil || len(v.Sessions) != 1 || v.Sessions[0].ID != 7 {
		t.Errorf("exit code %d, %v:\n%s", code, err, out)
	}
	if out, _, _ := withGatewayAt("/1").run(t, t.Context(), "get", "sessions", "--socket", "/1", "--service", "other"); strings.Contains(out, "shop") {
		t.Errorf("sessions of another service:\n%s", out)
	}
	if _, stderr, _ := withGatewayAt("/1").run(t, t.Context(), "get", "services", "--socket", "/1"); !strings.Contains(stderr, "refused (rule-none): 3") {
		t.Errorf("standard error has %q", stderr)
	}
}

func withGatewayAt(socket string) fakeAgents { return fakeAgents{socket: withGateway("r1")} }

func TestASessionIsDescribedByItsGateway(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	agents := fakeAgents{"/1": {}, "/2": withGateway("r2")}
	agents["/2"].session = api.SessionDetail{
		Version: api.Version, Node: "r2", ID: 17, Open: true, Opened: at, Service: "shop", Host: "shop.example.org", Client: "[fc00:7::2]:40000", Identity: "spiffe://staff.example/ops/alice", Serial: "3e9", Omitted: 3,
		Requests: []api.SessionRequest{
			{Number: 4, At: at, Ended: &at, Method: "GET", Host: "shop.example.org", Path: "/status", Rule: 1, Chain: "light", Status: 200, Bytes: 5},
			{At: at, Method: "GET", Path: "/secret", Reason: "rule-none"},
			{Number: 5, At: at, Method: "POST", Path: "/files/a", Rule: 2, Chain: "scan"},
		},
		Chains: []api.SessionChain{{Chain: "light", Path: "0x00000007", Ports: model.Ports{First: 20000, Last: 20999}, Sealed: "the server shop.internal"}, {Chain: "scan"}},
	}
	out, stderr, code := agents.run(t, t.Context(), "describe", "session", "17", "--socket", "/1", "--socket", "/2")
	for _, want := range []string{"session 17 of r2: open", "ops/alice from [fc00:7::2]:40000", "chain light: path 0x00000007, source ports 20000-20999, opened by the server shop.internal", "chain scan: not in the plan", "3 earlier requests", "refused: rule-none", "under way", "/status"} {
		if code != command.ExitDone || !strings.Contains(out, want) {
			t.Errorf("exit code %d, %s; want %q in\n%s", code, stderr, want, out)
		}
	}
	if !slices.Equal(agents["/2"].asked, []string{"describe 17"}) {
		t.Errorf("asked for %q", agents["/2"].asked)
	}
	out, _, code = agents.run(t, t.Context(), "describe", "session", "17", "--socket", "/2", "-o", "json")
	var v api.SessionDetail
	if err := json.Unmarshal([]byte(out), &v); code != command.ExitDone || err != nil || v.ID != 17 || len(v.Requests) != 3 {
		t.Errorf("exit code %d, %v:\n%s", code, err, out)
	}
	for _, c := range []struct {
		agents fakeAgents
		id     string
		code   int
		says   string
	}{
		{fakeAgents{"/1": withGateway("r1"), "/2": withGateway("r2")}, "4", command.ExitUsage, "name one with --instance"},
		{fakeAgents{"/1": {}, "/2": {}}, "4", command.ExitFailed, "none of the selected agents has a gateway"},
		{fakeAgents{"/1": {}, "/2": withGateway("r2")}, "alice", command.ExitUsage, "is not the ID of a session"},
	} {
		if _, stderr, code := c.agents.run(t, t.Context(), "describe", "session", c.id, "--socket", "/1", "--socket", "/2"); code != c.code || !strings.Contains(stderr, c.says) {
			t.Errorf("session %s: exit code %d, %q; want %d, %q", c.id, code, stderr, c.code, c.says)
		}
	}
}

func TestReadersAreThoseThatNodesHold(t *testing.T) {
	agents := fakeAgents{
		"/1": {readers: api.HeldReaders{Version: api.Version, Node: "r1", Readers: []api.HeldReader{{Chain: "scan", Function: "gateway", Identity: "spiffe://waystamp/node/r1/function/gateway", From: "clients", To: "spiffe://waystamp/node/r3/function/av", Epochs: []int{2}, Process: 41}}}},
		"/2": {readers: api.HeldReaders{Version: api.Version, Node: "r3", Readers: []api.HeldReader{
			{Chain: "scan", Function: "av", Identity: "spiffe://waystamp/node/r3/function/av", From: "spiffe://waystamp/node/r1/function/gateway", To: "the server shop.internal", Epochs: []int{1, 2}, Error: "its worker ended", Clear: []string{"wsi-av", "wso-av"}},
			{Chain: "deep", Function: "dpi", From: "x", To: "y", Process: 7},
		}}},
	}
	out, stderr, code := agents.run(t, t.Context(), "get", "readers", "scan", "--socket", "/1", "--socket", "/2")
	if code != command.ExitDone || !strings.Contains(out, "1 2") || !strings.Contains(out, "wsi-av, wso-av") || !strings.Contains(out, "41") || strings.Contains(out, "dpi") || !strings.Contains(stderr, "av of chain scan does not run: its worker ended") {
		t.Errorf("exit code %d, %s\n%s", code, stderr, out)
	}
	if out, _, _ := agents.run(t, t.Context(), "get", "readers", "--socket", "/2"); !strings.Contains(out, "dpi") {
		t.Errorf("of all chains:\n%s", out)
	}
	if _, stderr, code := agents.run(t, t.Context(), "get", "readers", "--socket", "/2", "-f", "x.yaml"); code != command.ExitUsage || !strings.Contains(stderr, "leave one out") {
		t.Errorf("of nodes and of a file: exit code %d, %q", code, stderr)
	}
}

func TestASessionIsEndedWhereTheGatewayIs(t *testing.T) {
	for _, c := range []struct {
		agents fakeAgents
		id     string
		code   int
		says   string
		asked  []string
	}{
		{fakeAgents{"/1": {}, "/2": withGateway("r2")}, "4", command.ExitDone, "", []string{"end 4"}},
		{fakeAgents{"/1": withGateway("r1"), "/2": withGateway("r2")}, "4", command.ExitUsage, "name one with --instance", nil},
		{fakeAgents{"/1": {}, "/2": {}}, "4", command.ExitFailed, "none of the selected agents has a gateway", nil},
		{fakeAgents{"/1": {}, "/2": withGateway("r2")}, "bob", command.ExitUsage, "is not the ID of a session", nil},
	} {
		_, stderr, code := c.agents.run(t, t.Context(), "session", "end", c.id, "--socket", "/1", "--socket", "/2")
		if code != c.code || !strings.Contains(stderr, c.says) || !slices.Equal(c.agents["/2"].asked, c.asked) {
			t.Errorf("exit code %d, %q, asked %q; want %d, %q, %q", code, stderr, c.agents["/2"].asked, c.code, c.says, c.asked)
		}
	}
}

func TestAnIdentityIsRevokedAtEachGateway(t *testing.T) {
	agents := fakeAgents{"/1": withGateway("r1"), "/2": {}, "/3": withGateway("r3")}
	agents["/3"].services.Error = "no certificate"
	const bob = "spiffe://staff.example/sales/bob"
	all := []string{"--socket", "/1", "--socket", "/2", "--socket", "/3"}
	out, stderr, code := agents.run(t, t.Context(), append([]string{"revoke", "identity", bob}, all...)...)
	if want := "r1: " + bob + " is revoked; sessions ended: 2\nr3: " + bob + " is revoked; the gateway does not run, and starts with it\n"; out != want || code != command.ExitDone {
		t.Errorf("exit code %d, %q, %q; want %q", code, out, stderr, want)
	}
	out, _, _ = agents.run(t, t.Context(), append([]string{"revoke", "identity", bob, "--undo"}, all...)...)
	if want := "r1: " + bob + " is not revoked any more\nr3: " + bob + " is not revoked any more\n"; out != want {
		t.Errorf("%q; want %q", out, want)
	}
	// One that fails keeps no other from it.
	agents["/1"].fails = errors.New("was killed")
	out, stderr, code = agents.run(t, t.Context(), append([]string{"revoke", "identity", bob}, all...)...)
	if want := "r3: " + bob + " is revoked; the gateway does not run, and starts with it\n"; out != want || code != command.ExitFailed || !strings.Contains(stderr, "was killed") {
		t.Errorf("exit code %d, %q, %q; want %q", code, out, stderr, want)
	}
	for socket, want := range map[string][]string{"/1": {"revoke " + bob + " false", "revoke " + bob + " true", "revoke " + bob + " false"}, "/2": nil} {
		if got := agents[socket].asked; !slices.Equal(got, want) {
			t.Errorf("%s was asked %q; want %q", socket, got, want)
		}
	}
}

func TestReadersAreThoseOfThePlan(t *testing.T) {
	out, stderr, code := fakeAgents{}.run(t, t.Context(), "get", "readers", "scan", "-f", "../../examples/zerotrust.yaml", "-o", "json")
	var v api.ReadersOutput
	if err := json.Unmarshal([]byte(out), &v); code != command.ExitDone || err != nil || len(v.Chains) != 1 {
		t.Fatalf("exit code %d, %v, %s:\n%s", code, err, stderr, out)
	}
	c := v.Chains[0]
	if want := []string{"the gateway on r1", "av on r3", "the server shop.internal"}; !slices.Equal(c.Readers, want) {
		t.Errorf("it is read by %q; want %q", c.Readers, want)
	}
	if len(c.Parts) != 2 || c.Parts[0].FromIdentity != "spiffe://waystamp/node/r1/function/gateway" || c.Parts[0].ToIdentity != "spiffe://waystamp/node/r3/function/av" ||
		!slices.Equal(c.Parts[0].Sealed, []string{"fw2 on r2"}) || c.Parts[1].From != "av on r3" || c.Parts[1].ToIdentity != "shop.internal" {
		t.Errorf("its parts are %+v", c.Parts)
	}
	if out, _, _ := (fakeAgents{}).run(t, t.Context(), "get", "readers", "web", "-f", "../../examples/paper.yaml"); !strings.Contains(out, "everybody on its way") {
		t.Errorf("a chain of no service:\n%s", out)
	}
	if _, stderr, code := (fakeAgents{}).run(t, t.Context(), "get", "readers", "none", "-f", "../../examples/zerotrust.yaml"); code != command.ExitUsage || !strings.Contains(stderr, "has no chain none") {
		t.Errorf("exit code %d, %q for a chain that is not there", code, stderr)
	}
}
