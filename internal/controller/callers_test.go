package controller

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/waystamp/waystamp/internal/identity"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

// Each call of the API by each kind of caller who may not make it is refused for that reason, and changes no record.
func TestEachCallIsForThoseWhoMayMakeIt(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	w.now = func() time.Time { return now }
	w.start()
	for _, name := range []string{"r1", "r2"} {
		w.must((&fake{w: w, name: name, dir: t.TempDir()}).try(w.token(name), name))
	}
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)

	newKey := func() *ecdsa.PrivateKey {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		w.must(err)
		return key
	}
	signed := func(ca *identity.CA, id identity.ID, at time.Time) *tls.Certificate {
		key := newKey()
		der, err := ca.Issue(id, key.Public(), at)
		w.must(err)
		return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	}
	operator := func(name, role string) *tls.Certificate {
		key := newKey()
		request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
		w.must(err)
		r, err := w.admin.AddOperator(t.Context(), connect.NewRequest(&v1.AddOperatorRequest{Name: name, Role: role, CertificateRequest: request}))
		w.must(err)
		return &tls.Certificate{Certificate: r.Msg.Certificates, PrivateKey: key}
	}
	ca := w.ctl.ca()
	foreign, err := identity.NewCA(ca.TrustDomain(), now)
	w.must(err)
	reader, admin := operator("alice", roleReader), operator("carol", roleAdmin)

	const admins, nodes, notThere = "Admin", "Node", "404"
	anyAdmin := func(says string) func(string, string) string {
		return func(service, _ string) string { return map[string]string{admins: says, nodes: notThere}[service] }
	}
	anyNode := func(says string) func(string, string) string {
		return func(service, method string) string {
			switch {
			case service == admins:
				return notThere
			case method == "Join":
				return "the token is not valid" // whoever calls
			}
			return says
		}
	}
	may := []string{"Diff", "Get", "Follow", "Describe", "Events", "Refusals", "Operators"}
	for _, c := range []struct {
		name  string
		shows *tls.Certificate
		later time.Duration
		says  func(service, method string) string // part of the answer; "": it may do that
	}{
		{"nobody", nil, 0, anyNode("the caller has no certificate")},
		{"a node of another CA", signed(foreign, identity.ID{Node: "r1"}, now), 0, anyNode("unknown authority")},
		{"an admin of another CA", signed(foreign, identity.ID{Operator: "carol"}, now), 0, anyNode("unknown authority")},
		{"a node that has not joined", signed(ca, identity.ID{Node: "r9"}, now), 0, anyNode("node r9 has not joined")},
		{"a node with another key", signed(ca, identity.ID{Node: "r1"}, now), 0, anyNode("node r1 has joined with another key since")},
		{"a node that was revoked", signed(ca, identity.ID{Node: "r2"}, now), 0, anyNode("node r2 was revoked")},
		{"a controller", signed(ca, identity.ID{Controller: true}, now), 0, anyNode("only nodes call here")},
		{"an operator who is none", signed(ca, identity.ID{Operator: "eve"}, now), 0, anyAdmin("operator eve was removed")},
		{"an operator with another key", signed(ca, identity.ID{Operator: "alice"}, now), 0, anyAdmin("operator alice was given another key since")},
		{"a reader", reader, 0, func(service, method string) string {
			if service == admins && slices.Contains(may, method) {
				return ""
			}
			return anyAdmin("operator alice is a reader, and this takes an admin")(service, method)
		}},
		{"an admin whose certificate has expired", admin, identity.OperatorValid + time.Hour, anyAdmin("the certificate of operator carol has expired")},
	} {
		t.Run(c.name, func(t *testing.T) {
			now = time.Now().Add(c.later)
			before, err := w.store.Snapshot(t.Context(), "")
			w.must(err)
			config := identity.ClientTLS(func() []*x509.Certificate { return w.ctl.rootsNow() }, func() (*tls.Certificate, error) {
				if c.shows == nil {
					return &tls.Certificate{}, nil
				}
				return c.shows, nil
			}, w.now)
			transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
			defer transport.CloseIdleConnections()
			for service, all := range map[string]string{admins: waystampv1connect.AdminName, nodes: waystampv1connect.NodeName} {
				methods := v1.File_waystamp_proto.Services().ByName(protoreflect.Name(service)).Methods()
				if methods.Len() < 6 {
					t.Fatalf("%s has %d calls", service, methods.Len())
				}
				for i := range methods.Len() {
					m := methods.Get(i)
					want := c.says(service, string(m.Name()))
					got := call(t, transport, "https://"+w.listen+"/"+all+"/"+string(m.Name()), m.IsStreamingServer())
					switch {
					case want == "" && (strings.Contains(got, "permission_denied") || strings.Contains(got, "unauthenticated") || strings.HasPrefix(got, notThere)):
						t.Errorf("%s/%s is refused: %s", service, m.Name(), got)
					case want != "" && !strings.Contains(got, want):
						t.Errorf("%s/%s is answered by %s; want %q", service, m.Name(), got, want)
					}
				}
			}
			after, err := w.store.Snapshot(t.Context(), "")
			w.must(err)
			if after.Revision != before.Revision {
				t.Errorf("the store is at revision %d, and was at %d", after.Revision, before.Revision)
			}
		})
	}
}

// call makes a call with an empty request, and returns the beginning of the answer.
func call(t *testing.T, transport *http.Transport, url string, streams bool) string {
	t.Helper()
	body, kind := []byte("{}"), "application/json"
	if streams {
		body, kind = append([]byte{0, 0, 0, 0, 2}, body...), "application/connect+json"
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	r.Header.Set("Connect-Protocol-Version", "1")
	answer, err := (&http.Client{Transport: transport}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	var b []byte
	if streams { // some do not end
		b = make([]byte, 1<<16)
		n, err := answer.Body.Read(b)
		if err != nil && err != io.EOF {
			t.Fatal(err)
		}
		b = b[:n]
	} else if b, err = io.ReadAll(answer.Body); err != nil {
		t.Fatal(err)
	}
	var said struct{ Code, Message string }
	if json.Unmarshal(b, &said) == nil && said.Code != "" {
		return said.Code + ": " + said.Message
	}
	return answer.Status + " " + string(b)
}
