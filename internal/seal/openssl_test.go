package seal

import (
	"bytes"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// onDisk writes an end's key and certificate where OpenSSL reads them.
func onDisk(t *testing.T, p *Part) (certificate, key string) {
	t.Helper()
	c, err := p.certificate(p.Epochs[0])
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(p.Epochs[0].Key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	return write(t, filepath.Join(dir, "end.pem"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate[0]})),
		write(t, filepath.Join(dir, "end.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

func openssl(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if _, err := exec.LookPath("openssl"); err != nil {
		t.Fatal("openssl is not installed; tools/deps.sh test installs it")
	}
	return exec.CommandContext(t.Context(), "openssl", args...)
}

func message(t *testing.T, m any) string {
	t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(binary.BigEndian.AppendUint16(nil, uint16(len(text)))) + string(text)
}

func TestOpenSSLDials(t *testing.T) {
	_, wrong := newKey(t)
	hello := Hello{Chain: "deep", Path: 7, Epoch: 3, Service: "shop", Protocol: HTTP1}
	for name, c := range map[string]struct {
		key    func(p *Part)
		args   []string // besides certificate and key
		bare   bool     // shows no certificate
		hello  Hello
		reason Reason // "": it is let in
	}{
		"the right key":    {hello: hello},
		"a wrong key":      {key: func(p *Part) { p.Epochs[0].Key = wrong }, hello: hello, reason: Peer},
		"no certificate":   {bare: true, hello: hello, reason: Peer},
		"TLS 1.2":          {args: []string{"-tls1_2"}, hello: hello, reason: Peer},
		"another protocol": {args: []string{"-alpn", "http/1.1"}, hello: hello, reason: Peer},
		"another name":     {args: []string{"-servername", "shop.example.org"}, hello: hello, reason: Peer},
		"another part":     {hello: Hello{Chain: "deep", Path: 9, Epoch: 3}, reason: PartMismatch},
	} {
		t.Run(name, func(t *testing.T) {
			dials, accepts := newPart(t)
			if c.key != nil {
				c.key(dials)
			}
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			certificate, key := onDisk(t, dials)
			args := []string{"s_client", "-connect", l.Addr().String(), "-quiet", "-no_ign_eof"}
			for _, with := range [][]string{{"-servername", serverName(3)}, {"-alpn", Protocol}} {
				if !strings.Contains(strings.Join(c.args, " "), with[0]) {
					args = append(args, with...)
				}
			}
			if !c.bare {
				args = append(args, "-cert", certificate, "-key", key)
			}
			args = append(args, c.args...)
			cmd := openssl(t, args...)
			var out bytes.Buffer
			cmd.Stdout = &out
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			io.WriteString(in, message(t, c.hello)+"request")
			under, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer under.Close()
			conn, h, err := accepts.Accept(t.Context(), under)
			if c.reason != "" {
				if err == nil || ReasonOf(err) != c.reason {
					t.Errorf("openssl is refused with %v; want %s", err, c.reason)
				}
				return
			}
			if err != nil || h != c.hello {
				t.Fatalf("openssl is refused: %v (%+v)", err, h)
			}
			got := make([]byte, len("request"))
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != "request" {
				t.Errorf("%q came: %v", got, err)
			}
			if err := conn.Answer(t.Context(), Answer{}); err != nil {
				t.Error(err)
			}
			io.WriteString(conn, "answer")
			conn.CloseWrite()
			cmd.Wait()
			if want := message(t, Answer{Open: true}) + "answer"; out.String() != want {
				t.Errorf("openssl got %q; want %q", out.String(), want)
			}
		})
	}
}

// A ticket stands for the certificate at the part that has given it, and at no other.
func TestOpenSSLResumes(t *testing.T) {
	dials, accepts := newPart(t)
	certificate, key := onDisk(t, dials)
	ticket := filepath.Join(t.TempDir(), "ticket")
	run := func(accepts *Part, with ...string) (resumed bool, err error) {
		t.Helper()
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		cmd := openssl(t, append([]string{"s_client", "-connect", l.Addr().String(), "-quiet", "-no_ign_eof", "-servername", serverName(3), "-alpn", Protocol}, with...)...)
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Wait()
		defer cmd.Process.Kill()
		io.WriteString(in, message(t, Hello{Chain: "deep", Path: 7, Epoch: 3, Service: "shop", Protocol: HTTP1}))
		under, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer under.Close()
		conn, _, err := accepts.Accept(t.Context(), under)
		if err != nil {
			return false, err
		}
		err = errors.Join(conn.Answer(t.Context(), Answer{}), conn.CloseWrite())
		cmd.Wait()
		return conn.ConnectionState().DidResume, err
	}
	if resumed, err := run(accepts, "-cert", certificate, "-key", key, "-sess_out", ticket); resumed || err != nil {
		t.Fatalf("resumed %t, %v; want a full handshake", resumed, err)
	}
	if resumed, err := run(accepts, "-sess_in", ticket); !resumed || err != nil {
		t.Errorf("resumed %t, %v; want that the ticket opens the part", resumed, err)
	}
	_, other := newPart(t)
	if resumed, err := run(other, "-sess_in", ticket); resumed || err == nil || ReasonOf(err) != Peer {
		t.Errorf("resumed %t, %v at another part; want %s", resumed, err, Peer)
	}
}

func TestOpenSSLAccepts(t *testing.T) {
	_, wrong := newKey(t)
	for name, c := range map[string]struct {
		key  func(p *Part)
		args []string
		said string // "": who dials goes on
	}{
		"the right key":    {},
		"a wrong key":      {key: func(p *Part) { p.Epochs[0].Key = wrong }, said: "its key is not that of"},
		"TLS 1.2":          {args: []string{"-tls1_2"}, said: "protocol version"},
		"another protocol": {args: []string{"-alpn", "h2"}, said: "no application protocol"},
	} {
		t.Run(name, func(t *testing.T) {
			dials, accepts := newPart(t)
			shown := *accepts
			shown.Epochs = []Epoch{accepts.Epochs[0]}
			if c.key != nil {
				c.key(&shown)
			}
			certificate, key := onDisk(t, &shown)
			args := []string{"s_server", "-accept", "127.0.0.1:0", "-naccept", "1", "-cert", certificate, "-key", key, "-Verify", "1"}
			if len(c.args) == 0 || c.args[0] != "-alpn" {
				args = append(args, "-alpn", Protocol)
			}
			cmd := openssl(t, append(args, c.args...)...)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			defer cmd.Process.Kill()
			port := until(t, out, "ACCEPT 127.0.0.1:")
			under, err := net.Dial("tcp", "127.0.0.1:"+port)
			if err != nil {
				t.Fatal(err)
			}
			defer under.Close()
			io.WriteString(in, message(t, Answer{Open: true})+"answer\n")
			conn, err := dials.Dial(t.Context(), under, "shop", HTTP1)
			if c.said != "" {
				if err == nil || !strings.Contains(err.Error(), c.said) {
					t.Errorf("who dials says %v; want %q in it", err, c.said)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len("answer\n"))
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != "answer\n" {
				t.Errorf("%q came: %v", got, err)
			}
			io.WriteString(conn, "request\n")
			if rest := until(t, out, `"service":"shop"`); !strings.Contains(rest, HTTP1) {
				t.Errorf("openssl heard %q behind the service", rest)
			}
		})
	}
}

// until reads up to a line that has a text, and gives what is behind it there.
func until(t *testing.T, r io.Reader, text string) string {
	t.Helper()
	var line []byte
	b := make([]byte, 1)
	for {
		if _, err := r.Read(b); err != nil {
			t.Fatalf("openssl ended before it said %q: %v", text, err)
		}
		if b[0] != '\n' {
			line = append(line, b[0])
			continue
		}
		if _, rest, ok := strings.Cut(string(line), text); ok {
			return rest
		}
		line = nil
	}
}

func FuzzHello(f *testing.F) {
	f.Add([]byte("\x00\x02{}"))
	f.Add([]byte(`{"chain":"deep","path":7}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var h Hello
		r := bytes.NewReader(b)
		if receive(r, &h) != nil {
			return
		}
		var again Hello
		var text bytes.Buffer
		if err := send(&text, h); err == nil {
			if err := receive(&text, &again); err != nil || again != h {
				t.Errorf("%+v comes back as %+v: %v", h, again, err)
			}
		}
	})
}
