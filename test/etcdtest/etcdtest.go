// Package etcdtest runs an etcd of its own for tests of the store and of the controller.
package etcdtest

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
)

// Server is an etcd on this machine, with an empty store.
type Server struct {
	Endpoint string // HOST:PORT
	cmd      *exec.Cmd
	dir      string
	log      string
	ended    chan struct{}
}

// shared is that of the test binary.
var shared struct {
	sync.Mutex
	server *Server
}

// Shared is one etcd for all tests of a package; each takes a prefix of its own. TestMain has to
// call Stop. Without etcd the test is skipped, which make test does not let pass.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.server != nil {
		return shared.server
	}
	if _, err := exec.LookPath("etcd"); err != nil {
		t.Skip("there is no etcd on this machine: tools/deps.sh test installs it")
	}
	dir, err := os.MkdirTemp("", "waystamp-etcd-")
	if err != nil {
		t.Fatal(err)
	}
	shared.server, err = start(dir)
	if err != nil {
		os.RemoveAll(dir)
		t.Fatal(err)
	}
	return shared.server
}

// Stop ends what Shared has started.
func Stop() {
	shared.Lock()
	defer shared.Unlock()
	if shared.server == nil {
		return
	}
	shared.server.cmd.Process.Kill()
	<-shared.server.ended
	os.RemoveAll(shared.server.dir)
	shared.server = nil
}

// start runs an etcd until it answers. Somebody may take its ports in between: it tries again.
func start(dir string) (*Server, error) {
	var last error
	for range 5 {
		client, err := freePort()
		if err != nil {
			return nil, err
		}
		peer, err := freePort()
		if err != nil {
			return nil, err
		}
		s := &Server{Endpoint: client, dir: dir, log: filepath.Join(dir, "log"), ended: make(chan struct{})}
		if err := os.RemoveAll(filepath.Join(dir, "data")); err != nil {
			return nil, err
		}
		s.cmd = exec.Command("etcd", "--name", "test", "--data-dir", filepath.Join(dir, "data"),
			"--listen-client-urls", "http://"+client, "--advertise-client-urls", "http://"+client,
			"--listen-peer-urls", "http://"+peer, "--initial-advertise-peer-urls", "http://"+peer, "--initial-cluster", "test=http://"+peer,
			"--heartbeat-interval", "50", "--election-timeout", "500", "--max-txn-ops", "1024", "--log-level", "error")
		out, err := os.Create(s.log)
		if err != nil {
			return nil, err
		}
		s.cmd.Stdout, s.cmd.Stderr = out, out
		err = s.cmd.Start()
		out.Close() // etcd has it
		if err != nil {
			return nil, fmt.Errorf("start etcd: %w", err)
		}
		go func() {
			defer close(s.ended)
			s.cmd.Wait()
		}()
		if s.answers() {
			return s, nil
		}
		s.cmd.Process.Kill()
		<-s.ended
		said, _ := os.ReadFile(s.log)
		last = fmt.Errorf("etcd does not answer at %s; it says:\n%s", client, said)
	}
	return nil, last
}

// answers waits until etcd listens, which it does when it has a leader.
func (s *Server) answers() bool {
	for limit := time.Now().Add(await.Limit(time.Minute)); time.Now().Before(limit); {
		conn, err := net.Dial("tcp", s.Endpoint)
		if err == nil {
			conn.Close()
			return true
		}
		select {
		case <-s.ended:
			return false
		case <-time.After(20 * time.Millisecond): // nothing tells of it
		}
	}
	return false
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}
