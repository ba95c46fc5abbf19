package controller

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/waystamp/waystamp/internal/member"
	"github.com/waystamp/waystamp/internal/plan"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/store"
)

// nodeIn finds a node in a state.
func nodeIn(s *v1.State, name string) *v1.NodeState {
	for _, n := range s.Nodes {
		if n.Name == name {
			return n
		}
	}
	return &v1.NodeState{}
}

// An agent cannot start: the node's kernel takes none of its plans. The operator reads why, and the next plan
// brings it up.
func TestANodeThatCannotStartSaysWhy(t *testing.T) {
	w, agents := domain(t)
	w.until("drained", drained)
	agents["r3"].stop()
	w.until("r3 is away", func(s *v1.State) bool { return nodeIn(s, "r3").State == nodeAway })
	last := agents["r3"].now().Revision
	m, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: agents["r3"].dir, Node: "r3", Log: w.log})
	w.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		ended.Wait()
	})
	ended.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	refused, other := errors.New("the kernel lacks\x1b[2J something\x00"), errors.New("the disk is full")
	isRefused := func(err error) bool { return errors.Is(err, refused) }
	up := make(chan struct{})
	agent := func(ctx context.Context) error {
		b := readFile(t, m.PlanFile())
		n, err := plan.DecodeNode(b)
		if err != nil {
			return err
		}
		if n.Revision == last {
			return refused
		}
		m.Report(member.Report{Revision: n.Revision, Digest: digest(b)})
		close(up)
		<-ctx.Done()
		return nil
	}
	served := make(chan error, 1)
	ended.Go(func() { served <- m.Serve(ctx, agent, isRefused) })
	s := w.until("r3 refuses", func(s *v1.State) bool { return nodeIn(s, "r3").State == nodeRefusing })
	// As an operator's terminal may show it.
	if n := nodeIn(s, "r3"); n.Reason != "the kernel lacks [2J something " || n.Revision != 0 || n.WantedRevision != last {
		t.Errorf("r3 is %v", n)
	}
	select {
	case err := <-served:
		t.Fatalf("the agent is given up: %v", err)
	default:
	}
	w.rotate()
	<-up
	w.until("the change goes on", func(s *v1.State) bool { return s.Step == string(stepTurn) })
	if n := nodeIn(w.state(), "r3"); n.Revision <= last || n.Reason == "the kernel lacks [2J something " {
		t.Errorf("r3 is %v", n)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
	// What is no plan's fault ends it.
	if err := m.Serve(t.Context(), func(context.Context) error { return other }, isRefused); !errors.Is(err, other) {
		t.Errorf("ends with %v", err)
	}
}

// A token that is no good does not keep a node out that has joined before.
func TestANodeThatHasJoinedGoesOnThoughItCannotJoinAnew(t *testing.T) {
	w := newWorld(t)
	w.start()
	f := w.join("r1")
	w.until("connected", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeReady })
	f.stop()
	w.until("away", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeAway })
	before := readFile(t, filepath.Join(f.dir, "identity.json"))
	other := w.token("r2") // which is for another node
	f.run(other)
	w.until("connected again", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeReady })
	if string(readFile(t, filepath.Join(f.dir, "identity.json"))) != string(before) {
		t.Error("its identity is another one")
	}
	// And a good one gives it another identity.
	f.stop()
	f.run(w.token("r1"))
	w.until("connected again", func(s *v1.State) bool { return nodeIn(s, "r1").State == nodeReady })
	if string(readFile(t, filepath.Join(f.dir, "identity.json"))) == string(before) {
		t.Error("it did not join anew")
	}
}

// stuck is a store in which the state of the domain cannot be written.
type stuck struct {
	store.Store
	mu      sync.Mutex
	is      bool
	refused chan struct{} // a commit was
}

var errStuck = &store.Failure{Did: "write to", Err: errors.New("the disk is full")}

func (s *stuck) Commit(ctx context.Context, t store.Txn) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, state := t.Put[keyState]; state && s.is {
		notify(s.refused)
		return 0, errStuck
	}
	return s.Store.Commit(ctx, t)
}

// wait is until it has refused a commit.
func (s *stuck) wait(t *testing.T) {
	select {
	case <-s.refused:
	case <-time.After(patience):
		t.Fatal("nothing was committed")
	}
}

func (s *stuck) set(is bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.is = is
}

// Else the fresh secrets that a revocation gives to all others would never be made.
func TestANodeComesBackOnlyWhenItsRevocationIsCarriedOut(t *testing.T) {
	w := newWorld(t)
	var disk *stuck
	w.wrap = func(s store.Store) store.Store {
		disk = &stuck{Store: s, refused: make(chan struct{}, 1)}
		return disk
	}
	w.start()
	agents := map[string]*fake{}
	for _, name := range []string{"r1", "r2", "r3"} {
		agents[name] = w.join(name)
	}
	w.until("settled", settled(w.apply(file)))
	disk.set(true)
	_, err := w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r2"}))
	w.must(err)
	token, err := w.admin.CreateToken(t.Context(), connect.NewRequest(&v1.CreateTokenRequest{Node: "r2", Reinstate: true}))
	w.must(err)
	back := &fake{w: w, dir: t.TempDir()}
	if err := back.try(token.Msg.Token, "r2"); code(err) != connect.CodeAborted || !strings.Contains(err.Error(), "is not carried out yet") {
		t.Errorf("joined before all others have fresh secrets: %v", err)
	}
	disk.set(false)
	w.until("r2 is out", func(s *v1.State) bool { return drained(s) && s.Chains[0].State == chainBlocked })
	w.must(back.try(token.Msg.Token, "r2")) // the token is good still
	w.until("web is back", func(s *v1.State) bool { return s.Chains[0].State == chainActive || nodeIn(s, "r2").State == nodeAway })
}

func TestAFileThatIsNoSocketStaysWhereTheControllerShallListen(t *testing.T) {
	dir := t.TempDir()
	precious := filepath.Join(dir, "plan.json")
	writeFile(t, precious, []byte("precious"))
	for _, kind := range []string{"unix:", "tls+unix:"} {
		if _, err := Listen(kind + precious); err == nil || !strings.Contains(err.Error(), "a file that is no socket is there") {
			t.Errorf("%s: got %v", kind, err)
		}
	}
	if string(readFile(t, precious)) != "precious" {
		t.Error("the file has changed")
	}
	// A socket that nobody listens on any more is in nobody's way; one that is in use is.
	path := filepath.Join(dir, "s")
	l, err := Listen("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen("unix:" + path); err == nil || !strings.Contains(err.Error(), "somebody listens there already") {
		t.Errorf("got %v", err)
	}
	l.Listener.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
	l.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Fatal(err)
	}
	again, err := Listen("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func TestWhatANodeSaysIsKeptToALength(t *testing.T) {
	long := strings.Repeat("ü", textMax)
	if s := short(long); len(s) > textMax+len(" …") || !strings.HasPrefix(long, strings.TrimSuffix(s, " …")) {
		t.Errorf("%d bytes of %d are kept, ending %q", len(s), len(long), s[len(s)-8:])
	}
	if s := short("a\tb\nc\x1b]0;title\x07 \u202ed\xff"); s != "a b c ]0;title   d?" {
		t.Errorf("got %q", s)
	}
	if l := shortAll(make([]string, 2*textsMax)); len(l) != textsMax {
		t.Errorf("%d texts are kept", len(l))
	}
}

// A request is not to blame for a store that fails: it is begun when that goes again.
func TestAChangeIsBegunWhenTheStoreGoesAgain(t *testing.T) {
	w := newWorld(t)
	var disk *stuck
	w.wrap = func(s store.Store) store.Store {
		disk = &stuck{Store: s, refused: make(chan struct{}, 1)}
		return disk
	}
	w.start()
	for _, name := range []string{"r1", "r2", "r3"} {
		w.join(name)
	}
	disk.set(true)
	serial := w.apply(file)
	disk.wait(t)
	disk.set(false)
	if s := w.until("settled", settled(serial)); s.Problem != "" {
		t.Errorf("the problem is %q", s.Problem)
	}
}

// A node whose answer was lost joins again with the token and the key that it has on disk. Nobody else does, and it does not when the token has expired,
// another machine has joined under its name, or it was revoked.
func TestANodeWhoseAnswerWasLostJoinsAgain(t *testing.T) {
	w := newWorld(t)
	now := time.Now()
	w.now = func() time.Time { return now }
	w.start()
	errLost := errors.New("the answer is lost")
	loses := func(dir, token string, lost bool) error {
		m, err := member.Open(member.Config{Controllers: []string{w.listen}, Token: token, Dir: dir, Node: "r1", Now: w.now, Transport: func(next http.RoundTripper) http.RoundTripper {
			return roundTripper(func(r *http.Request) (*http.Response, error) {
				answer, err := next.RoundTrip(r)
				if err == nil && lost {
					answer.Body.Close()
					return nil, errLost
				}
				return answer, err
			})
		}})
		w.must(err)
		return m.Join(t.Context())
	}
	refused := func(what, dir, token string) {
		t.Helper()
		if err := loses(dir, token, false); code(err) != connect.CodePermissionDenied || !strings.Contains(err.Error(), "not valid") {
			t.Errorf("%s: %v", what, err)
		}
	}
	first, token := t.TempDir(), w.token("r1")
	if err := loses(first, token, true); err == nil || !strings.Contains(err.Error(), errLost.Error()) {
		t.Fatalf("the first answer: %v", err)
	}
	refused("another machine, with the token", t.TempDir(), token)
	if err := loses(first, token, true); err == nil || !strings.Contains(err.Error(), errLost.Error()) {
		t.Fatalf("the second answer: %v", err)
	}
	w.must(loses(first, token, false))
	m, err := member.Open(member.Config{Controllers: []string{w.listen}, Dir: first, Node: "r1", Now: w.now})
	w.must(err)
	w.must(m.Call(t.Context()))
	if _, err := os.Stat(filepath.Join(first, "joining.json")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file with the key to join with: %v", err)
	}

	lost := func() (dir, token string) {
		t.Helper()
		dir, token = t.TempDir(), w.token("r1")
		if err := loses(dir, token, true); !strings.Contains(err.Error(), errLost.Error()) {
			t.Fatal(err)
		}
		return dir, token
	}
	before, beforeToken := lost()
	late, lateToken := lost()
	refused("another machine has joined since", before, beforeToken)
	now = now.Add(tokenValid + time.Second)
	refused("the token has expired", late, lateToken)
	w.token("r2") // and what is kept of it goes
	snap, err := w.store.Snapshot(t.Context(), keyJoined)
	w.must(err)
	if len(snap.Records) != 0 {
		t.Errorf("%d records of tokens that have expired", len(snap.Records))
	}
	out, outToken := lost()
	_, err = w.admin.Revoke(t.Context(), connect.NewRequest(&v1.RevokeRequest{Node: "r1"}))
	w.must(err)
	refused("it was revoked", out, outToken)
}
