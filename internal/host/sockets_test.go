package host

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
)

// Of each socket that is asked for the kernel says its state and its bytes, whatever others there are; what is no connection is not there.
func TestTCPSocketsSayTheirBytes(t *testing.T) {
	ns, err := Anonymous()
	must(t, err)
	n, err := Open(ns)
	must(t, err)
	t.Cleanup(func() { must(t, errors.Join(n.Close(), ns.Close())) })
	must(t, n.SetUp("lo"))
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		var l net.Listener
		config := net.ListenConfig{}
		config.SetMultipathTCP(false)
		must(t, ns.Do(func() (err error) {
			l, err = config.Listen(context.Background(), "tcp", address)
			return err
		}))
		defer l.Close()
		var client net.Conn
		d := net.Dialer{}
		d.SetMultipathTCP(false)
		must(t, ns.Do(func() (err error) {
			client, err = d.Dial("tcp", l.Addr().String())
			return err
		}))
		defer client.Close()
		server, err := l.Accept()
		must(t, err)
		defer server.Close()
		_, err = client.Write(make([]byte, 1000))
		must(t, err)
		_, err = io.ReadFull(server, make([]byte, 1000))
		must(t, err)
		_, err = server.Write(make([]byte, 70))
		must(t, err)
		_, err = io.ReadFull(client, make([]byte, 70))
		must(t, err)
		must(t, client.(*net.TCPConn).CloseWrite())
		if _, err := server.Read(make([]byte, 1)); err != io.EOF {
			t.Fatalf("the server: %v; want the end", err)
		}
		from, to := client.LocalAddr().(*net.TCPAddr).AddrPort(), client.RemoteAddr().(*net.TCPAddr).AddrPort()
		other := netip.AddrPortFrom(from.Addr(), from.Port()^1)
		got, err := ns.TCPSockets([]TCPEnds{{from, to}, {to, from}, {to, other}, {other, to}})
		must(t, err)
		// Its FIN may be acknowledged a little later.
		if len(got) != 4 || !strings.HasPrefix(got[0].State.String(), "fin-wait-") || got[0].Sent != 1000 || got[0].Received != 70 ||
			got[1].State.String() != "close-wait" || got[1].Sent != 70 || got[1].Received != 1000 || got[2] != (TCPSocket{}) || got[3] != (TCPSocket{}) {
			t.Errorf("the sockets of %s are %+v", address, got)
		}
	}
}
