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

// startHAProxy starts HAProxy in a namespace in which every address is local on the way in.
func (t *streamTrack) startHAProxy(ctx context.Context, ns *host.NetNS) (pid int, err error) {
	var listener net.Listener
	err = ns.Do(func() (err error) {
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		listener, err = config.Listen(ctx, "tcp6", fmt.Sprintf("[::]:%d", streamPort))
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("start HAProxy: %w", err)
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	file, err := listener.(*net.TCPListener).File()
	if err != nil {
		return 0, fmt.Errorf("start HAProxy: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	dir, err := os.MkdirTemp("", "waystamp-haproxy-")
	if err != nil {
		return 0, fmt.Errorf("start HAProxy: %w", err)
	}
	t.closers = append(t.closers, func() error { return os.RemoveAll(dir) })
	path := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(path, []byte(haproxyConfig), 0o600); err != nil {
		return 0, fmt.Errorf("start HAProxy: %w", err)
	}
	cmd := host.Command(ctx, ns, "haproxy", "-db", "-f", path)
	var said strings.Builder
	cmd.Stderr, cmd.ExtraFiles = &said, []*os.File{file}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start HAProxy: %w", err)
	}
	t.closers = append(t.closers, func() error {
		err := cmd.Process.Kill()
		if errors.Is(err, os.ErrProcessDone) {
			err = nil
		}
		werr := cmd.Wait()
		if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !s.Signaled() {
			return errors.Join(err, fmt.Errorf("HAProxy ended before its time: %w: %s", werr, strings.TrimSpace(said.String())))
		}
		return err
	})
	return cmd.Process.Pid, nil
}

// haveHAProxy tells whether there is one to be held against.
func haveHAProxy() bool {
	_, err := exec.LookPath("haproxy")
	return err == nil
}
