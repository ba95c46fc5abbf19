package controller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/identity"
	"github.com/waystamp/waystamp/internal/manifest"
	v1 "github.com/waystamp/waystamp/internal/rpc/waystampv1"
	"github.com/waystamp/waystamp/internal/rpc/waystampv1/waystampv1connect"
)

// Listener is where the controller is reached: operators on a unix socket, nodes over
// TLS.
type Listener struct {
	net.Listener
	Operators bool
	metrics   bool // ListenMetrics
}

// Listen opens a listener: unix:PATH for operators, tcp:HOST:PORT for nodes, tls+unix:PATH for
// nodes that are namespaces of this machine.
func Listen(address string) (Listener, error) {
	kind, at, ok := strings.Cut(address, ":")
	switch {
	case ok && kind == "unix" && filepath.IsAbs(at):
		l, err := listenUnix(at)
		return Listener{Listener: l, Operators: true}, err
	case ok && kind == "tls+unix" && filepath.IsAbs(at):
		l, err := listenUnix(at)
		return Listener{Listener: l}, err
	case ok && kind == "tcp" && at != "":
		l, err := net.Listen("tcp", at)
		if err != nil {
			return Listener{}, fmt.Errorf("listen for nodes on %s: %w", at, err)
		}
		return Listener{Listener: l}, nil
	}
	return Listener{}, fmt.Errorf("%q is no address to listen on; expect unix:/PATH for operators, tcp:HOST:PORT or tls+unix:/PATH for nodes", address)
}

// listenUnix takes the place of a socket that nobody listens on any more.
func listenUnix(path string) (net.Listener, error) {
	if conn, err := net.Dial("unix", path); err == nil {
		conn.Close()
		return nil, fmt.Errorf("listen on %s: somebody listens there already", path)
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("listen on %s: a file that is no socket is there; remove it, or name another path", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("listen on a socket: %w", err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("listen on a socket: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on a socket: %w", err), l.Close())
	}
	return l, nil
}

// KeepFromDumps keeps this process's memory, which has all secrets, out of core dumps, and from other processes of its user.
func KeepFromDumps() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("keep the memory out of core dumps: %w", err)
	}
	return nil
}

// admins are root and who runs the controller.
func admins(uid uint32) bool { return uid == 0 || int(uid) == os.Geteuid() }

// What a request may have at most: a domain file with the rules of its functions; from a node
// far less.
const (
	adminReadMax = 2*manifest.SourceMax + 1<<20
	nodeReadMax  = 1 << 20
)

type callerKey struct{}

// caller is who is at the other end of a connection.
type caller struct {
	uid    uint32 // on a unix socket
	known  bool   // uid is
	peer   identity.Peer
	err    error // why there is no peer
	remote string
	via    string // the controller that passes the call on; "": none

	certificate []byte // DER, as it came; peer is what it says
}

func (c caller) String() string {
	switch {
	case c.known:
		return fmt.Sprintf("uid %d", c.uid)
	case c.err == nil && (c.peer.Node != "" || c.peer.Operator != ""):
		return c.peer.ID.String()
	}
	return "nobody known"
}

func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller)
	return c
}

// http2 finds out within half a minute that a peer is gone, and bounds what a connection
// can ask for at once: a node has one stream and a call or two.
func http2() *http.HTTP2Config {
	return &http.HTTP2Config{MaxConcurrentStreams: 16, SendPingTimeout: 15 * time.Second, PingTimeout: 10 * time.Second, WriteByteTimeout: 30 * time.Second}
}

// serve answers on one listener until ctx ends, and closes it.
func (c *Controller) serve(ctx context.Context, l Listener) error {
	server := &http.Server{
		Handler:           c.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		HTTP2:             http2(),
		BaseContext:       func(net.Listener) context.Context { return context.WithoutCancel(ctx) }, // calls end with the lead
		ErrorLog:          log.New(io.Discard, "", 0),                                               // of connections that end; the audit has the calls
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			u, ok := conn.(*net.UnixConn)
			if !ok {
				return ctx
			}
			who := caller{remote: "unix"}
			if uid, err := peerUID(u); err == nil {
				who.uid, who.known = uid, true
			}
			return context.WithValue(ctx, callerKey{}, who)
		},
	}
	stopped := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { stopped <- server.Close() })
	var err error
	if l.Operators {
		err = server.Serve(l)
	} else {
		server.TLSConfig = identity.ServerTLS(c.certificate)
		err = server.ServeTLS(l, "", "")
	}
	if stop() { // it ended by itself
		return fmt.Errorf("serve on %s: %w", l.Addr(), errors.Join(err, server.Close()))
	}
	<-stopped
	return context.Cause(ctx)
}

// handler notes who calls, and answers or passes the call on. Who has no right to anything here does
// not get further.
func (c *Controller) handler() http.Handler {
	operators, nodes := http.NewServeMux(), http.NewServeMux()
	operators.Handle(waystampv1connect.NewAdminHandler(admin{c}, connect.WithInterceptors(audited{c, true}), connect.WithReadMaxBytes(adminReadMax)))
	nodes.Handle(waystampv1connect.NewNodeHandler(node{c}, connect.WithInterceptors(audited{c, false}), connect.WithReadMaxBytes(nodeReadMax)))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := callerOf(r.Context())
		if r.TLS != nil {
			who.remote = r.RemoteAddr
			who.peer, who.err = identity.PeerOf(r.TLS, c.rootsNow(), c.cfg.Now())
			if who.err == nil {
				who.certificate = r.TLS.PeerCertificates[0].Raw
			}
			header := r.Header.Get(headerPassed)
			if header != "" && who.err != nil { // a controller, perhaps, whose clock is wrong: its caller is not nobody
				refuseCall(w, r, refuse(connect.CodeUnauthenticated, "the certificate of whoever passes the call on: %w; are the clocks right?", who.err))
				return
			}
			if header != "" && who.peer.Controller {
				var err error
				if who, err = c.takePassed(who, header); err != nil {
					refuseCall(w, r, connect.NewError(connect.CodeUnauthenticated, err))
					return
				}
			}
		} else if !who.known || !c.cfg.Admins(who.uid) {
			c.note(auditLine{Who: who.String(), From: who.remote, Call: r.URL.Path, Result: "refused: not an operator"}, true)
			http.Error(w, "only root and the user of the controller may call it here", http.StatusForbidden)
			return
		}
		leading := c.leads()
		switch {
		case leading != nil:
			ctx, cancel := context.WithCancelCause(context.WithValue(r.Context(), callerKey{}, who))
			defer cancel(nil)
			defer context.AfterFunc(leading, func() { cancel(errLeadsNoMore) })()
			mux := nodes
			if who.known || who.err == nil && who.peer.Operator != "" {
				mux = operators
			}
			mux.ServeHTTP(w, r.WithContext(ctx))
		case who.via != "": // by one that believes what was so a moment ago
			refuseCall(w, r, errLeadsNoMore)
		default:
			c.passOn(w, r, who)
		}
	})
}

// peerUID is the user at the other end of a unix socket.
func peerUID(u *net.UnixConn) (uint32, error) {
	raw, err := u.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return cred.Uid, nil
}

// audited writes a line for each call: who, what, from where, and what became of it. Requests and answers
// hold secrets and are not in it. Who may not call does not get further.
type audited struct {
	c         *Controller
	operators bool // the service is theirs
}

// allowed is an error if the caller of a service for operators may not do that.
func (a audited) allowed(ctx context.Context, procedure string) error {
	if !a.operators {
		return nil // each call looks the node up
	}
	return a.c.authorize(ctx, procedure)
}

// subject is what a call is about.
func subject(request any) string {
	switch r := request.(type) {
	case *v1.CreateTokenRequest:
		return r.Node
	case *v1.RevokeRequest:
		return r.Node
	case *v1.DeleteRequest:
		return r.Chain
	case *v1.RotateRequest:
		if r.All {
			return "all chains"
		}
		return strings.Join(r.Chains, ", ")
	case *v1.AddOperatorRequest:
		return short(r.Name) + " as " + short(r.Role)
	case *v1.RemoveOperatorRequest:
		return short(r.Name)
	case *v1.BackupRequest:
		return "all records"
	case *v1.ApplyRequest:
		return r.File.GetName()
	}
	return ""
}

func (a audited) line(ctx context.Context, procedure, about string, err error) {
	who := callerOf(ctx)
	result := "done"
	if err != nil {
		result = connect.CodeOf(err).String()
		if ctx.Err() != nil {
			result = "ended"
		}
	}
	a.c.counted.Add(metricCalls, 1, strings.TrimPrefix(procedure, "/waystamp.v1."), result)
	if (procedure == waystampv1connect.NodeRefusedProcedure || procedure == waystampv1connect.NodeTracedProcedure || procedure == waystampv1connect.NodeNumbersProcedure) && err == nil {
		return // once a second from each node that refuses packets, traces them, or has epochs that drain
	}
	if a.operators && err == nil && !slices.Contains(readable, procedure) {
		text := short(who.String())
		if about != "" {
			text += ": " + short(about)
		}
		a.c.journal.add(a.c.cfg.Now(), aboutCall, path.Base(procedure), text)
	}
	// What nodes do all the time is in the log alone.
	often := !a.operators && (result == "done" || result == "ended") && (procedure == waystampv1connect.NodePlansProcedure || procedure == waystampv1connect.NodeAcknowledgeProcedure)
	a.c.note(auditLine{Who: who.String(), From: who.remote, Via: who.via, Call: procedure, About: about, Result: result}, !often)
}

// WrapUnary implements connect.Interceptor.
func (a audited) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		if err := a.allowed(ctx, r.Spec().Procedure); err != nil {
			a.line(ctx, r.Spec().Procedure, subject(r.Any()), err)
			return nil, err
		}
		answer, err := next(ctx, r)
		a.line(ctx, r.Spec().Procedure, subject(r.Any()), err)
		return answer, err
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (a audited) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (a audited) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		err := a.allowed(ctx, conn.Spec().Procedure)
		if err == nil {
			err = next(ctx, conn)
		}
		a.line(ctx, conn.Spec().Procedure, "", err)
		return err
	}
}
