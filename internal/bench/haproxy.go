package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/waystamp/waystamp/internal/host"
)

// haproxyConfig is for what HAProxy does of our worker's work: it ends connections that it is
// handed at a listener, opens others to where they were meant to go, from the client's address
// and port, and splices the bytes. It has one thread, as our worker has one event loop.
const haproxyConfig = `global
  nbthread 1
  maxconn 5000
defaults
  mode tcp
  timeout connect 10s
  timeout client 1h
  timeout server 1h
  option splice-request
  option splice-response
listen streams
  bind fd@3
  option transparent
  source [::] usesrc client
`

// haproxyGateway is for what HAProxy does of our gateway's work: it ends clients' mutual TLS, is for one host, says who the client is
// by Client-Cert (RFC 9440), writes a line for each request, and goes on by TLS to the origin, whose certificate it
// verifies, by connections that it keeps. It has a thread for each CPU, as Go has. The fields are the number of threads, the folder of
// certificates and the origin's address.
const haproxyGateway = `global
  nbthread %d
  maxconn 5000
  log stdout len 2048 format raw local0
  tune.bufsize 32768
  ssl-default-bind-options ssl-min-ver TLSv1.3
  ssl-default-server-options ssl-min-ver TLSv1.3
defaults
  mode http
  log global
  log-format "%%ci:%%cp [%%tr] %%HM %%[capture.req.hdr(0)] %%HPO %%ST %%B %%{+Q}[ssl_c_s_dn] %%[ssl_c_serial,hex] %%[ssl_fc_is_resumed]"
  timeout connect 10s
  timeout client 2m
  timeout server 2m
  timeout http-request 10s
frontend shop
  bind fd@3 ssl crt %[2]s/haproxy.pem ca-file %[2]s/staff.pem verify required alpn h2,http/1.1
  http-request capture req.hdr(host) len 64
  http-request deny deny_status 421 unless { req.hdr(host),field(1,:) -i shop.example.org }
  http-request set-header Client-Cert :%%[ssl_c_der,base64]:
  default_backend origin
backend origin
  http-reuse always
  server origin %[3]s ssl verify required ca-file %[2]s/web.pem verifyhost shop.internal sni str(shop.internal)
`

// startHAProxy starts HAProxy in a namespace in which every address is local on the way in.
func (t *streamTrack) startHAProxy(ctx context.Context, ns *host.NetNS) (pid int, err error) {
	pid, end, err := runHAProxy(ctx, ns, fmt.Sprintf("[::]:%d", streamPort), haproxyConfig, nil)
	if err != nil {
		return 0, err
	}
	t.closers = append(t.closers, end)
	return pid, nil
}

// runHAProxy runs HAProxy in a namespace. It is given a listener at an address, as descriptor 3. What it writes to
// standard output goes to log. end ends it; an error says that it ended before.
func runHAProxy(ctx context.Context, ns *host.NetNS, at, text string, log *os.File) (pid int, end func() error, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start HAProxy: %w", err)
		}
	}()
	var listener net.Listener
	err = ns.Do(func() (err error) {
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		listener, err = config.Listen(ctx, "tcp6", at)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return 0, nil, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	dir, err := os.MkdirTemp("", "waystamp-haproxy-")
	if err != nil {
		return 0, nil, err
	}
	path := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return 0, nil, errors.Join(err, os.RemoveAll(dir))
	}
	cmd := host.Command(ctx, ns, "haproxy", "-db", "-f", path)
	var said strings.Builder
	cmd.Stderr, cmd.ExtraFiles = &said, []*os.File{file}
	if log != nil {
		cmd.Stdout = log
	}
	if err := cmd.Start(); err != nil {
		return 0, nil, errors.Join(err, os.RemoveAll(dir))
	}
	return cmd.Process.Pid, func() error {
		err := cmd.Process.Kill()
		if errors.Is(err, os.ErrProcessDone) {
			err = nil
		}
		werr := cmd.Wait()
		if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !s.Signaled() {
			err = errors.Join(err, fmt.Errorf("HAProxy ended before its time: %w: %s", werr, strings.TrimSpace(said.String())))
		}
		return errors.Join(err, os.RemoveAll(dir))
	}, nil
}

// haveHAProxy tells whether there is one to be held against.
func haveHAProxy() bool {
	_, err := exec.LookPath("haproxy")
	return err == nil
}
