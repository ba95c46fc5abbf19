package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/plan"
)

// The life of workers of functions on byte streams, where it does not go as it should.

// installed is a file that is the program of a lab's agents and workers.
type installed struct {
	t    *testing.T
	path string
}

func newInstalled(t *testing.T) *installed {
	return &installed{t, filepath.Join(newDir(t), "waystamp")}
}

// put installs another file, as packages do: what runs keeps the one before.
func (i *installed) put(from string) {
	i.t.Helper()
	b, err := os.ReadFile(from)
	must(i.t, err)
	must(i.t, os.WriteFile(i.path+".new", b, 0o755))
	must(i.t, os.Rename(i.path+".new", i.path))
}

// in has a lab use it.
func (i *installed) in(c *lab.Config) { c.Binary = i.path }

// pretender is waystamp with workers that pretend; see test/pretender.
func pretender(t *testing.T) string {
	t.Helper()
	out := filepath.Join(newDir(t), "pretender")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", out, "../pretender")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the pretender: %v\n%s", err, said)
	}
	return out
}

// runs tells whether a process is there. A number that another process has got since counts as that one.
func runs(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(b), "worker")
}

func (w *world) gone(what string, pid int) {
	w.t.Helper()
	eventually(w.t, func() error {
		if runs(pid) {
			return fmt.Errorf("%s, process %d, is there", what, pid)
		}
		return nil
	})
}

// workerNow is the worker of a function, which is known to have one.
func (w *world) workerNow(node, function string) int {
	w.t.Helper()
	pid, err := w.workerOf(node, function)
	must(w.t, err)
	return pid
}

// draining are a function's workers that take no more connections.
func (w *world) draining(node, function string) []api.StreamDrain {
	w.t.Helper()
	f, err := w.function(node, function)
	must(w.t, err)
	return f.Stream.Draining
}

// Workers that only say that they take no more connections lose the program that gives them connections, and are ended; so are
// those that do not end with their interface.
func TestAWorkerThatPretendsIsEnded(t *testing.T) {
	t.Parallel()
	file, hostile := newInstalled(t), pretender(t)
	file.put(hostile)
	w := buildFrom(t, parse(t, example(t, "streams.yaml")), file.in)
	t.Cleanup(func() { // where the test has failed
		for _, f := range [][2]string{{"r2", "zip"}, {"r3", "unzip"}} {
			if pid, err := w.workerOf(f[0], f[1]); err == nil {
				unix.Kill(pid, unix.SIGKILL)
			}
		}
	})
	w.download("h2", "h1", 100_000)
	zip, unzip := w.workerNow("r2", "zip"), w.workerNow("r3", "unzip")
	s := w.stream("h2", "h1")
	s.more(1 << 20)

	w.kill("r2")
	file.put(program)
	must(t, w.StartAgent(soon(t), "r2"))
	w.gone("the worker that pretends", zip)
	if err := <-s.ended; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the stream of a worker that pretends ended with %v; want a reset", err)
	}
	<-s.sent
	if now := w.workerNow("r2", "zip"); now == zip {
		t.Error("zip has the worker that pretends")
	}
	if d := w.draining("r2", "zip"); len(d) > 0 {
		t.Errorf("%+v drain; want none", d)
	}
	w.download("h2", "h1", 100_000)

	// Nobody speaks with it, and its interface is gone.
	w.kill("r3")
	if r := w.detach("r3", "--yes"); r.code != 0 {
		t.Fatal(r)
	}
	w.gone("the worker that does not end with its interface", unzip)
	must(t, w.StartAgent(soon(t), "r3"))
	w.download("h2", "h1", 100_000)
	for _, node := range []string{"r2", "r3"} {
		w.mayRefuse(node, "stream-down")
		w.mayRefuse(node, "stream-unknown")
	}
}

// A worker that hangs cannot be taken over: it is ended, and the next one has its place.
func TestAWorkerThatHangsIsEnded(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	w.download("h2", "h1", 100_000)
	hangs := w.workerNow("r2", "zip")
	w.kill("r2")
	must(t, unix.Kill(hangs, unix.SIGSTOP))
	must(t, w.StartAgent(soon(t), "r2"))
	w.gone("the worker that hangs", hangs)
	w.download("h2", "h1", 100_000)
	w.mayRefuse("r2", "stream-down")
	w.mayRefuse("r2", "stream-unknown")
}

// A worker that hangs gives back the interfaces of the function that it was attached to.
func TestAWorkerThatHangsGivesItsFunctionBack(t *testing.T) {
	t.Parallel()
	text := plainDomain(t, "[fc00:8::2]:443", map[string]string{
		"dpi": `node: r3, kind: unaware, intrusive: true, attach: {to: dpi-to, from: dpi-from, via: "fe80::2"}`,
	}, "    - {name: dpi, kind: forward}\n")
	s := newShopOf(t, text, "[fc00:8::2]:443")
	want := "hello|5 200 1\n"
	if got := s.curl("alice.pem", "1.1", "/files/a"); got != want {
		t.Fatalf("curl prints %q; want %q", got, want)
	}
	hangs := s.workerNow("r3", "dpi")
	s.kill("r3")
	must(t, unix.Kill(hangs, unix.SIGSTOP))
	must(t, s.StartAgent(soon(t), "r3"))
	s.gone("the worker that hangs", hangs)
	f, err := s.function("r3", "dpi")
	must(t, err)
	if f.Stream.Error != "" || f.Stream.Worker == 0 {
		t.Errorf("r3 says %q of dpi, with worker %d; want that the first start met no interface of before", f.Stream.Error, f.Stream.Worker)
	}
	eventually(t, func() error {
		if got := s.curl("alice.pem", "1.1", "/files/a"); got != want {
			return fmt.Errorf("curl prints %q; want %q", got, want)
		}
		return nil
	})
	for _, reason := range []string{"function-gone", "stream-down", "stream-unknown"} {
		s.mayRefuse("r3", reason)
	}
}

// What another version, or another plan, brings along is refused: the worker of before goes on, and takes connections. Its successor
// has not been in its place.
func TestWhatIsRefusedLeavesTheWorkers(t *testing.T) {
	t.Parallel()
	file := newInstalled(t)
	file.put(program)
	w := buildFrom(t, parse(t, example(t, "streams.yaml")), file.in)
	s := w.stream("h2", "h1")
	s.more(1 << 20)
	before := w.workerNow("r2", "zip")
	node := w.planOf("r2")
	refused := withLevel(node, 3)
	refused.Egresses = slices.Clone(node.Egresses)
	for i := range refused.Egresses {
		refused.Egresses[i].Window *= 2 // which takes another epoch
	}
	goesOn := func(when string) {
		t.Helper()
		if !runs(before) {
			t.Fatalf("%s: the worker has ended", when)
		}
		s.more(1 << 20)
		w.download("h2", "h1", 100_000)
	}

	must(t, w.WriteNodePlan("r2", refused))
	eventually(t, func() error {
		if st := w.status("r2"); !strings.Contains(st.Error, "the one before stays in force") {
			return fmt.Errorf("r2 says %q of a plan that it cannot put in force", st.Error)
		}
		return nil
	})
	if now := w.workerNow("r2", "zip"); now != before || len(w.draining("r2", "zip")) > 0 {
		t.Errorf("zip has worker %d, and %+v drain; want %d, and none", now, w.draining("r2", "zip"), before)
	}
	goesOn("with a refused plan")

	must(t, w.StopAgent(soon(t), "r2"))
	file.put(program)
	if err := w.StartAgent(soon(t), "r2"); err == nil {
		t.Fatal("an agent starts with a plan that cannot be in force")
	}
	goesOn("with a refused version")
	must(t, w.WriteNodePlan("r2", *node))
	must(t, w.StartAgent(soon(t), "r2"))
	if now := w.workerNow("r2", "zip"); now == before {
		t.Error("zip has the worker of the version before")
	}
	goesOn("with another version")
	s.finish()
	must(t, s.in.Close()) // the sender has ended
	w.gone("the worker of before, without a connection,", before)
}

// withLevel is a node's plan whose functions compress by another level of gzip.
func withLevel(node *plan.Node, level int) plan.Node {
	next := *node
	next.Proxies = slices.Clone(node.Proxies)
	for i, p := range next.Proxies {
		if p.Stream != nil {
			s := *p.Stream
			s.Run = []string{fmt.Sprintf(`{"gzip":{"level":%d}}`, level)}
			next.Proxies[i].Stream = &s
		}
	}
	return next
}

// A function's configuration changes under load: connections that are open go on as they were, by a worker that is shown, and others
// are the new one's. The next agent knows both.
func TestAWorkerOfBeforeGoesOnWithItsConnections(t *testing.T) {
	t.Parallel()
	w := build(t, example(t, "streams.yaml"))
	const size = 200_000
	sum := lab.Content{Seed: 5, Size: size}.SHA256()
	d := w.downloads("h2", size)
	s := w.stream("h2", "h1")
	s.more(1 << 20)
	pids := []int{w.workerNow("r2", "zip")}
	for level := 2; level < 6; level++ {
		for range 20 {
			d.one("h1", sum)
		}
		w.follow(withLevel(w.planOf("r2"), level))
		now := w.workerNow("r2", "zip")
		if now == pids[len(pids)-1] {
			t.Fatal("another configuration has the worker of before")
		}
		if level == 2 {
			drains := w.draining("r2", "zip")
			if len(drains) != 1 || drains[0].Worker != pids[0] || drains[0].Now == nil || *drains[0].Now == 0 || drains[0].Seconds < 3000 {
				t.Errorf("zip has %+v; want worker %d with connections, for an hour", drains, pids[0])
			}
			if r := runIn(t, w.ns("r2"), "get", "streams", "--socket", filepath.Join(w.AgentDir("r2"), "agent.sock")); !strings.Contains(r.stdout+r.stderr, "takes no more connections") {
				t.Errorf("get streams does not show the worker that drains: %s", r)
			}
			w.kill("r2")
			must(t, w.StartAgent(soon(t), "r2"))
			if got := w.draining("r2", "zip"); len(got) != 1 || got[0].Worker != pids[0] || got[0].Now != nil {
				t.Errorf("the next agent has %+v of zip; want worker %d, of which it knows nothing more", got, pids[0])
			}
			if again := w.workerNow("r2", "zip"); again != now {
				t.Errorf("the next agent has worker %d of zip; want %d", again, now)
			}
			s.more(1 << 20)
		}
		if level == 3 { // one of before has ended by itself, once it has no connections
			s.more(1 << 20)
			s.finish()
			must(t, s.in.Close()) // the sender has ended
			w.gone("the first worker", pids[0])
		}
		pids = append(pids, now)
	}
	d.wait.Wait()
	if len(d.failed) > 0 {
		t.Errorf("%d downloads failed, the first: %v", len(d.failed), <-d.failed)
	}
	eventually(t, func() error {
		if d := w.draining("r2", "zip"); len(d) > 0 {
			return fmt.Errorf("%+v drain", d)
		}
		return nil
	})
	for _, pid := range pids[:len(pids)-1] {
		w.gone("a worker of before", pid)
	}
	w.download("h2", "h1", 100_000)
}

// planOf is a node's plan.
func (w *world) planOf(node string) *plan.Node {
	w.t.Helper()
	for i := range w.plan.Nodes {
		if w.plan.Nodes[i].Name == node {
			return &w.plan.Nodes[i]
		}
	}
	w.t.Fatalf("there is no node %s", node)
	panic("unreachable")
}

// Another version takes over while clients ask by new sealed connections: those that the worker before has let in are
// given their keys, and each is answered.
func TestSealedConnectionsOutliveAVersion(t *testing.T) {
	t.Parallel()
	file := newInstalled(t)
	file.put(program)
	s := newShopOf(t, sealedDomain(t), "[fc00:8::2]:443", file.in)
	var asked atomic.Int64
	done, wrong := make(chan struct{}), make(chan string, 4)
	for range 4 {
		go func() {
			for {
				if got, want := s.curl("alice.pem", "1.1", "/files/a"), "hello|5 200 1\n"; got != want {
					wrong <- fmt.Sprintf("curl prints %q; want %q", got, want)
					return
				}
				asked.Add(1)
				select {
				case <-done:
					wrong <- ""
					return
				default:
				}
			}
		}()
	}
	more := func(n int64) {
		t.Helper()
		before := asked.Load()
		eventually(t, func() error {
			if now := asked.Load() - before; now < n && len(wrong) == 0 {
				return fmt.Errorf("clients have got %d answers, and not %d", now, n)
			}
			return nil
		})
	}
	more(4)
	for range 3 {
		before := s.workerNow("r3", "dpi")
		s.kill("r3")
		file.put(program)
		must(t, s.StartAgent(soon(t), "r3"))
		if now := s.workerNow("r3", "dpi"); now == before {
			t.Error("dpi has the worker of the version before")
		}
		more(10)
	}
	close(done)
	for range 4 {
		if problem := <-wrong; problem != "" {
			t.Error(problem)
		}
	}
	s.mayRefuse("r3", "stream-unknown")
}

// The place of one function goes under load, with its interface: the connections of this function are reset, and those of another one on
// the same node go on. What comes meanwhile is refused for that, and the function is back.
func TestAPlaceThatIsDeletedUnderLoad(t *testing.T) {
	t.Parallel()
	text := example(t, "streams.yaml")
	for _, c := range [][2]string{
		{"\nchains:", "  - {name: tap, node: r2, kind: stream, run: [count]}\n\nchains:"},
		{"  - name: web4\n    ingress: [r1]\n    functions: [zip, unzip]", "  - name: web4\n    ingress: [r1]\n    functions: [tap]"},
	} {
		if !strings.Contains(text, c[0]) {
			t.Fatalf("the example has no %q", c[0])
		}
		text = strings.Replace(text, c[0], c[1], 1)
	}
	w := build(t, text)
	zip := w.stream("h2", "h1")
	zip.more(1 << 20)
	w.ipv4 = true
	tap := w.stream("h2", "h1")
	tap.more(1 << 20)
	w.ipv4 = false
	before, other := w.workerNow("r2", "zip"), w.workerNow("r2", "tap")
	must(t, w.net("r2").DeleteLink("wss-zip"))
	for _, ended := range []chan error{zip.ended, zip.sent} {
		if err := <-ended; !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			t.Errorf("an end of the connection hears %v; want a reset", err)
		}
	}
	w.gone("the worker of the place", before)
	eventually(t, func() error {
		now, err := w.workerOf("r2", "zip")
		if err == nil && now == before {
			err = errors.New("the worker is the one whose place was deleted")
		}
		return err
	})
	w.download("h2", "h1", 1_000_000)
	tap.more(1 << 20)
	tap.finish()
	if now := w.workerNow("r2", "tap"); now != other {
		t.Errorf("tap has worker %d; want %d, whose place nobody has touched", now, other)
	}
	w.mayRefuse("r2", "stream-down")    // while the place was away
	w.mayRefuse("r2", "stream-unknown") // of the old connection
	w.mayRefuse("r3", "stream-unknown")
}
