package agent

import (
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/dataplane"
)

// An agent sends what its data path counts, and goes on if nobody listens.
func TestAnAgentSendsFlowRecords(t *testing.T) {
	n := newNode(t)
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv6loopback})
	n.must(err)
	to := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	n.cfg.Flows = FlowExport{Collector: to, Every: 20 * time.Millisecond}
	p := r1(t, nil)
	n.write(n.encode(p))
	s := n.start()
	// receive waits for a message that has such a set, and gives what is in it.
	const templates, path = 2, 257
	receive := func(id uint16) string {
		t.Helper()
		b := make([]byte, 2000)
		n.must(conn.SetReadDeadline(time.Now().Add(patience)))
		for {
			size, err := conn.Read(b)
			n.must(err)
			if binary.BigEndian.Uint16(b) != 10 || int(binary.BigEndian.Uint16(b[2:])) != size {
				t.Fatalf("it sent %x", b[:size])
			}
			for set := b[16:size]; len(set) >= 4; set = set[binary.BigEndian.Uint16(set[2:]):] {
				if binary.BigEndian.Uint16(set) == id {
					return string(set[4:binary.BigEndian.Uint16(set[2:])])
				}
			}
		}
	}
	receive(templates)
	n.set(func() {
		n.counts = dataplane.Counts{Paths: []dataplane.PathCount{{Role: dataplane.RoleHeadend, Chain: "web", Path: p.Headends[0].Path, Frames: 12, Bytes: 9000}}}
	})
	if got := receive(path); !strings.Contains(got, "\x02r1") || !strings.Contains(got, "\x03web\x10headend, forward") {
		t.Errorf("the path is not in %q", got)
	}
	// Nobody listens: the agent says so once, and its data path stays. Then somebody does.
	n.must(conn.Close())
	n.log.Wait("flow records are lost")
	unix := &http.Transport{Dial: func(string, string) (net.Conn, error) { return net.Dial("unix", SocketPath(n.cfg.RunDir)) }}
	defer unix.CloseIdleConnections()
	r, err := (&http.Client{Transport: unix}).Get("http://agent/metrics")
	n.must(err)
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	n.must(err)
	if all := parsed(t, string(text)); all[`waystamp_flow_messages_total{what="failed"}`] == 0 || all[`waystamp_flow_messages_total{what="sent"}`] < 2 {
		t.Errorf("it counts %v", all)
	}
	conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(to))
	n.must(err)
	defer conn.Close()
	receive(templates)
	n.log.Wait("flow records leave again")
	n.must(s.halt())
}

func TestACollectorHasAnAddress(t *testing.T) {
	for _, s := range []string{"", "fd00::9", "collector:4739", "[fd00::9]:0", "[::]:4739", "0.0.0.0:4739", "[fd00::9]:99999"} {
		if _, err := ParseCollector(s); err == nil || !strings.Contains(err.Error(), "expect ADDRESS:PORT") {
			t.Errorf("%q: %v", s, err)
		}
	}
	want := netip.MustParseAddrPort("192.0.2.1:4739")
	if got, err := ParseCollector("192.0.2.1:4739"); err != nil || got != want {
		t.Errorf("it is %v, %v", got, err)
	}
}
