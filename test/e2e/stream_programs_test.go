package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// Programs that people have, through the two functions on byte streams of examples/streams.yaml: what they
// send is compressed between r2 and r3. Servers run on h2 and clients on h1, over both versions of IP.
// tools/deps.sh installs them.

// server is a program that serves on a host until the test ends.
type server struct {
	cmd   *host.Cmd
	said  text
	ended chan struct{} // closed when it has ended
	err   error
}

// serve starts a program on a host, and waits until it accepts connections at each address. It ends with stop.
func (w *world) serve(name string, stop syscall.Signal, set func(*exec.Cmd), at []netip.AddrPort, args ...string) *server {
	w.t.Helper()
	s := &server{cmd: host.Command(context.Background(), w.ns(name), args[0], args[1:]...), ended: make(chan struct{})}
	s.cmd.Stdout, s.cmd.Stderr = &s.said, &s.said
	if set != nil {
		set(s.cmd.Cmd)
	}
	must(w.t, s.cmd.Start())
	go func() {
		s.err = s.cmd.Wait()
		close(s.ended)
	}()
	w.t.Cleanup(func() {
		s.cmd.Process.Signal(stop)
		select {
		case <-s.ended:
		case <-time.After(settleTime):
			s.cmd.Process.Kill()
			<-s.ended
			w.t.Errorf("%s did not end within %s:\n%s", args[0], settleTime, s.said.String())
		}
		if w.t.Failed() {
			w.t.Logf("%s ended with %v; it said:\n%s", args[0], s.err, s.said.String())
		}
	})
	for _, a := range at {
		eventually(w.t, func() error {
			select {
			case <-s.ended:
				w.t.Fatalf("%s ended: %v\n%s", args[0], s.err, s.said.String())
			default:
			}
			return w.Do(name, func() error {
				c, err := net.Dial("tcp", a.String())
				if err != nil {
					return err
				}
				return c.Close()
			})
		})
	}
	return s
}

// addrs are a host's addresses, of both versions.
func (w *world) addrs(name string) (out []netip.Addr) {
	w.t.Helper()
	was := w.ipv4
	for _, w.ipv4 = range []bool{false, true} {
		out = append(out, w.addr(name))
	}
	w.ipv4 = was
	return out
}

// at are the addresses of a host with a port.
func (w *world) at(name string, port uint16) (out []netip.AddrPort) {
	w.t.Helper()
	for _, a := range w.addrs(name) {
		out = append(out, netip.AddrPortFrom(a, port))
	}
	return out
}

// programPath is where a program is: in PATH, or as a pattern says.
func programPath(t *testing.T, name, pattern string) string {
	t.Helper()
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	found, err := filepath.Glob(pattern)
	must(t, err)
	if len(found) == 0 {
		t.Fatalf("there is no %s; make deps installs it", name)
	}
	return found[len(found)-1]
}

// tell runs a program on a host with an input, and returns what it prints. Its exit status must be code.
func (w *world) tell(at string, in io.Reader, code int, args ...string) []byte {
	w.t.Helper()
	var out, said bytes.Buffer
	cmd := host.Command(soon(w.t), w.ns(at), args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &out, &said
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.t.Fatal(err)
	}
	if got := cmd.ProcessState.ExitCode(); got != code {
		w.t.Fatalf("%s ended with %d, want %d:\n%s", strings.Join(args, " "), got, code, said.String())
	}
	return out.Bytes()
}

func newStreams(t *testing.T) *world {
	t.Helper()
	return borrow(t, example(t, "streams.yaml"))
}

// opened checks that f makes connections through both functions.
func (w *world) opened(f func()) {
	w.t.Helper()
	before := map[string]uint64{}
	for node, name := range map[string]string{"r2": "zip", "r3": "unzip"} {
		n, err := w.function(node, name)
		must(w.t, err)
		before[node] = n.Stream.Opened
	}
	f()
	for node, name := range map[string]string{"r2": "zip", "r3": "unzip"} {
		n, err := w.function(node, name)
		must(w.t, err)
		if n.Stream.Opened == before[node] {
			w.t.Errorf("%s has opened no connection", name)
		}
	}
}

const (
	webFiles   = 40
	webAsks    = 5 // for each file, in each of six ways: 1200 downloads
	webLargest = 300_000
)

// nginx serves files of all sizes, and each download by curl is whole: 1200 of them, by HTTP/1.1 with a connection
// each, by HTTP/1.1 and by HTTP/2 over TLS that ends at the server.
func TestCurlAndNginxThroughStreamFunctions(t *testing.T) {
	t.Parallel()
	w := newStreams(t)
	dir := newDir(t)
	files := filepath.Join(dir, "files")
	must(t, os.Mkdir(files, 0o755))
	random := mrand.New(mrand.NewPCG(1, 2))
	sums := map[int][sha256.Size]byte{}
	for i := range webFiles {
		size := []int{0, 1, 1460, 16 << 10, random.IntN(webLargest)}[i%5]
		b := make([]byte, size)
		if i%2 == 0 {
			rand.Read(b) // which no compressor makes smaller
		} else {
			for j := range b {
				b[j] = "waystamp"[j/97%8]
			}
		}
		sums[i] = sha256.Sum256(b)
		must(t, os.WriteFile(filepath.Join(files, strconv.Itoa(i)), b, 0o644))
	}
	ca := newAuthority(t, dir, "ca")
	ca.issue("web.pem", "web.key", func(c *x509.Certificate) {
		for _, a := range w.addrs("h2") {
			c.IPAddresses = append(c.IPAddresses, a.AsSlice())
		}
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	config := write(t, "nginx.conf", strings.ReplaceAll(`
user root;
worker_processes 1;
pid DIR/pid;
error_log stderr warn;
events { worker_connections 2000; }
http {
	access_log off;
	client_body_temp_path DIR/1; proxy_temp_path DIR/2; fastcgi_temp_path DIR/3; uwsgi_temp_path DIR/4; scgi_temp_path DIR/5;
	keepalive_requests 100;
	server {
		listen 80; listen [::]:80;
		listen 443 ssl http2; listen [::]:443 ssl http2;
		ssl_certificate DIR/web.pem; ssl_certificate_key DIR/web.key;
		root DIR/files;
	}
}
`, "DIR", dir))
	w.serve("h2", unix.SIGQUIT, nil, append(w.at("h2", 80), w.at("h2", 443)...), "nginx", "-e", "stderr", "-p", dir, "-c", config, "-g", "daemon off;")
	w.opened(func() {
		for _, a := range w.addrs("h2") {
			for _, way := range []struct {
				version string
				args    []string
			}{
				{"1.1", []string{"http", "--http1.1", "-H", "Connection: close"}},
				{"1.1", []string{"https", "--http1.1"}},
				{"2", []string{"https", "--http2"}},
			} {
				out := filepath.Join(dir, "out")
				must(t, os.Mkdir(out, 0o755))
				url := fmt.Sprintf("%s://%s/[0-%d]?[1-%d]", way.args[0], strings.TrimSuffix(netip.AddrPortFrom(a, 0).String(), ":0"), webFiles-1, webAsks)
				args := append([]string{"curl", "-sS", "--fail", "--noproxy", "*", "-m", "120", "--cacert", filepath.Join(dir, "ca.pem"), "-Z", "--parallel-max", "20",
					"-w", "%{http_version}\n", "-o", filepath.Join(out, "#1-#2")}, way.args[1:]...)
				said := string(w.tell("h1", nil, 0, append(args, url)...))
				if want := strings.Repeat(way.version+"\n", webFiles*webAsks); said != want {
					t.Errorf("%s %v: curl spoke %d lines; want HTTP/%s for all %d downloads:\n%.200s", a, way.args, strings.Count(said, "\n"), way.version, webFiles*webAsks, said)
				}
				for i := range webFiles {
					for j := range webAsks {
						b, err := os.ReadFile(filepath.Join(out, fmt.Sprintf("%d-%d", i, j+1)))
						if errors.Is(err, os.ErrNotExist) && sums[i] == sha256.Sum256(nil) {
							continue // curl makes no file of nothing
						}
						must(t, err)
						if sha256.Sum256(b) != sums[i] {
							t.Errorf("%s %v: download %d of file %d has %d bytes and a wrong checksum", a, way.args, j+1, i, len(b))
						}
					}
				}
				must(t, os.RemoveAll(out))
			}
		}
	})
}

// ssh logs in by a key at a server whose key it knows, and gets a command's output, errors and exit status; 1 MB goes in and comes back.
func TestSSHThroughStreamFunctions(t *testing.T) {
	t.Parallel()
	w := newStreams(t)
	dir := newDir(t)
	sshd := programPath(t, "sshd", "/usr/sbin/sshd")
	for _, name := range []string{"host", "user"} {
		w.tell("h1", nil, 0, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", filepath.Join(dir, name))
	}
	read := func(name string) string {
		b, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		return strings.TrimSpace(string(b))
	}
	keys := write(t, "keys", read("user.pub")+"\n")
	var known strings.Builder
	for _, a := range w.addrs("h2") {
		fmt.Fprintf(&known, "[%s]:2222 %s\n", a, read("host.pub"))
	}
	knownHosts := write(t, "known", known.String())
	config := write(t, "sshd_config", fmt.Sprintf(`
Port 2222
HostKey %s
AuthorizedKeysFile %s
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
`, filepath.Join(dir, "host"), keys))
	// Where its process without rights has its root.
	must(t, os.MkdirAll("/run/sshd", 0o755))
	w.serve("h2", unix.SIGTERM, nil, w.at("h2", 2222), sshd, "-D", "-e", "-f", config)
	data := make([]byte, 1<<20)
	rand.Read(data)
	sum := sha256.Sum256(data)
	w.opened(func() {
		for _, a := range w.addrs("h2") {
			ssh := []string{"ssh", "-F", "none", "-p", "2222", "-i", filepath.Join(dir, "user"), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
				"-o", "StrictHostKeyChecking=yes", "-o", "UserKnownHostsFile=" + knownHosts, "-o", "GlobalKnownHostsFile=none", "root@" + a.String()}
			if got := string(w.tell("h1", nil, 7, append(ssh, "printf done; exit 7")...)); got != "done" {
				t.Errorf("%s: the command prints %q; want done", a, got)
			}
			if got, want := string(w.tell("h1", bytes.NewReader(data), 0, append(ssh, "sha256sum")...)), hex.EncodeToString(sum[:]); !strings.HasPrefix(got, want) {
				t.Errorf("%s: what came to the server has the checksum %.64s; want %s", a, got, want)
			}
			if got := w.tell("h1", bytes.NewReader(data), 0, append(ssh, "cat")...); !bytes.Equal(got, data) {
				t.Errorf("%s: %d bytes came back, and are not the %d that were sent", a, len(got), len(data))
			}
		}
	})
}

// psql gets the same answers of a server by the chain as by a socket on the server's host: rows by the megabyte, many small
// queries one after the other, and a query that is cancelled by a connection of its own.
func TestPostgreSQLThroughStreamFunctions(t *testing.T) {
	t.Parallel()
	w := newStreams(t)
	dir := newDir(t)
	const nobody = 65534
	must(t, os.Chown(dir, nobody, nobody))
	// PostgreSQL refuses to run as root.
	asNobody := func(c *exec.Cmd) {
		c.Dir = dir
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		c.Env = append(os.Environ(), "HOME="+dir, "LC_ALL=C")
	}
	data := filepath.Join(dir, "data")
	initdb := exec.CommandContext(soon(t), programPath(t, "initdb", "/usr/lib/postgresql/*/bin/initdb"), "-D", data, "-A", "trust", "-U", "test", "-E", "UTF8", "--no-locale", "--no-sync")
	asNobody(initdb)
	if out, err := initdb.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	rules := "local all all trust\n"
	for _, a := range w.addrs("h1") {
		rules += fmt.Sprintf("host all all %s/%d trust\n", a, a.BitLen())
	}
	must(t, os.WriteFile(filepath.Join(data, "pg_hba.conf"), []byte(rules), 0o644))
	var listen []string
	for _, a := range w.addrs("h2") {
		listen = append(listen, a.String())
	}
	w.serve("h2", unix.SIGINT, asNobody, w.at("h2", 5432), programPath(t, "postgres", "/usr/lib/postgresql/*/bin/postgres"), "-D", data, "-k", dir, "-p", "5432",
		"-c", "listen_addresses="+strings.Join(listen, ","), "-c", "fsync=off", "-c", "shared_buffers=16MB", "-c", "max_connections=10")
	psql := func(at, server string, code int, in string, more ...string) string {
		t.Helper()
		return string(w.tell(at, strings.NewReader(in), code, append([]string{"env", "PGCONNECT_TIMEOUT=30", "psql", "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-U", "test", "-d", "postgres", "-h", server}, more...)...))
	}
	queries := "select i, md5(i::text), repeat('x', i % 100) from generate_series(1, 60000) i;\n"
	for i := range 200 {
		queries += fmt.Sprintf("select %d, md5('%[1]d');\n", i)
	}
	want := psql("h2", dir, 0, queries)
	if n := strings.Count(want, "\n"); n != 60200 {
		t.Fatalf("the server answers with %d rows on its own host; want 60200", n)
	}
	w.opened(func() {
		for _, a := range w.addrs("h2") {
			if got := psql("h1", a.String(), 0, queries); got != want {
				t.Errorf("%s: the answers have %d bytes by the chain, and are not the %d of the server's own host", a, len(got), len(want))
			}
			rows := strings.Repeat("a row that goes to the server\n", 20_000)
			if got := psql("h1", a.String(), 0, "create temp table t (c text);\ncopy t from stdin;\n"+rows+"\\.\nselect count(*), md5(string_agg(c, '')) from t;\n"); !strings.HasPrefix(got, "20000|") {
				t.Errorf("%s: after 20000 rows were sent the server says %q", a, got)
			}
			// psql asks for this by another connection when it is interrupted, and the first one says that it was.
			w.cancelled(a)
		}
	})
}

// cancelled interrupts psql in the middle of a query at a server.
func (w *world) cancelled(a netip.Addr) {
	w.t.Helper()
	var said bytes.Buffer
	cmd := host.Command(soon(w.t), w.ns("h1"), "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-U", "test", "-d", "postgres", "-h", a.String(), "-c", "select pg_sleep(600)")
	cmd.Stderr = &said
	must(w.t, cmd.Start())
	eventually(w.t, func() error {
		n := strings.TrimSpace(string(w.tell("h1", nil, 0, "psql", "-X", "-q", "-t", "-A", "-U", "test", "-d", "postgres", "-h", a.String(), "-c",
			"select count(*) from pg_stat_activity where query = 'select pg_sleep(600)' and state = 'active'")))
		if n != "1" {
			return fmt.Errorf("%s queries sleep at the server", n)
		}
		return nil
	})
	must(w.t, cmd.Process.Signal(unix.SIGINT))
	err := cmd.Wait()
	if !strings.Contains(said.String(), "canceling statement due to user request") {
		w.t.Errorf("%s: psql ended with %v and said %q; want its query cancelled", a, err, said.String())
	}
}

// A WebSocket (RFC 6455) carries messages of all sizes both ways at once, and its end.
func TestAWebSocketThroughStreamFunctions(t *testing.T) {
	t.Parallel()
	w := newStreams(t)
	const messages = 300
	message := func(i int) []byte {
		b := make([]byte, []int{1, 125, 126, 4096, 70_000}[i%5])
		mrand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(b)
		return b
	}
	send := func(c *websocket.Conn) error {
		for i := range messages {
			if err := websocket.Message.Send(c, message(i)); err != nil {
				return fmt.Errorf("send message %d: %w", i, err)
			}
		}
		return nil
	}
	receive := func(c *websocket.Conn) error {
		for i := range messages {
			var got []byte
			if err := websocket.Message.Receive(c, &got); err != nil {
				return fmt.Errorf("receive message %d: %w", i, err)
			}
			if !bytes.Equal(got, message(i)) {
				return fmt.Errorf("message %d came with %d bytes, and is another one", i, len(got))
			}
		}
		return nil
	}
	both := func(c *websocket.Conn) error {
		c.SetDeadline(time.Now().Add(settleTime))
		sent := make(chan error, 1)
		go func() { sent <- send(c) }()
		err := receive(c)
		if err != nil {
			c.Close() // send ends, too
		}
		return errors.Join(err, <-sent)
	}
	w.opened(func() {
		for _, a := range w.addrs("h2") {
			var l net.Listener
			must(t, w.Do("h2", func() (err error) {
				l, err = net.Listen("tcp", netip.AddrPortFrom(a, 0).String())
				return err
			}))
			served := make(chan error, 1)
			s := &http.Server{Handler: websocket.Handler(func(c *websocket.Conn) {
				err := both(c)
				var more []byte
				if err == nil {
					if err = websocket.Message.Receive(c, &more); err == nil {
						err = fmt.Errorf("%d bytes came behind all messages", len(more))
					} else if errors.Is(err, io.EOF) {
						err = nil // the client's Close frame
					}
				}
				served <- err
			})}
			var wait sync.WaitGroup
			wait.Go(func() { s.Serve(l) })
			must(t, w.Do("h1", func() error {
				raw, err := net.DialTimeout("tcp", l.Addr().String(), settleTime)
				if err != nil {
					return err
				}
				config, err := websocket.NewConfig("ws://"+l.Addr().String()+"/", "http://h1/")
				if err != nil {
					return errors.Join(err, raw.Close())
				}
				c, err := websocket.NewClient(config, raw)
				if err != nil {
					return errors.Join(err, raw.Close())
				}
				return errors.Join(both(c), c.Close())
			}))
			must(t, <-served)
			must(t, s.Close())
			wait.Wait()
		}
	})
}
