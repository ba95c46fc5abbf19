// Package ipfix holds flow records against collectors that we did not write: nfdump and pmacct.
package ipfix

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/flowrecords"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// patience bounds what others take to start and to end.
var patience = await.Limit(time.Minute)

// documentation is the private enterprise number of RFC 5612.
const documentation = 32473

var (
	sid  = netip.MustParseAddr("fc00:0:0:20c::")
	last = netip.MustParseAddr("fc00:0:0:20d::")
	node = &plan.Node{
		Name: "r2", Address: netip.MustParseAddr("fc00:2::1"),
		Headends: []plan.Headend{{PathID: plan.PathID{Path: 8}, Segments: []netip.Addr{sid}}},
		Endpoints: []plan.Endpoint{{
			PathID: plan.PathID{Path: 7}, SID: sid, Behaviour: model.BehaviourEndAD, Function: "fw", Sources: []netip.Addr{netip.MustParseAddr("fc00:1::1")},
		}},
		Egresses: []plan.Egress{{PathID: plan.PathID{Path: 9}, SID: last, Sources: []netip.Addr{netip.MustParseAddr("fc00:1::1"), netip.MustParseAddr("fc00:3::1")}}},
	}
)

// counters are what the node has counted after n intervals.
func counters(n uint64) api.Counters {
	c := api.Counters{
		Node: "r2",
		Paths: []api.Path{
			{Role: "headend", Chain: "web", Direction: "reverse", Path: 8, Frames: 5 * n, Bytes: 500 * n},
			{Role: "endpoint", Chain: "web", Direction: "forward", Function: "fw", Path: 7, SID: &sid, Frames: 10 * n, Bytes: 1000 * n},
			{Role: "egress", Chain: "web", Direction: "reverse", Path: 9, SID: &last, Frames: 7 * n, Bytes: 900 * n},
			{Role: "endpoint", Chain: "labels", Direction: "forward", Function: "fw", Path: 11, Frames: 3 * n, Bytes: 200 * n},
		},
		Refusals: []api.Refusal{{Reason: "replay", Dropped: 4 * n, Reported: n}},
	}
	// So many that they need several messages.
	for i := range 30 {
		c.Paths = append(c.Paths, api.Path{Role: "headend", Chain: "many", Direction: "forward", Path: uint32(100 + i), Frames: n, Bytes: 100 * n})
	}
	return c
}

// intervals is how often records are sent; the first time gives what the others are compared with.
const intervals = 5

// send sends what an agent would.
func send(t *testing.T, to string) {
	t.Helper()
	r, err := flowrecords.New("r2", "default", documentation)
	must(t, err)
	conn, err := net.Dial("udp", to)
	must(t, err)
	defer conn.Close()
	began := time.Now().Add(-time.Hour)
	for i := range intervals + 1 {
		messages, err := r.Messages(began.Add(time.Duration(i)*time.Minute), node, counters(uint64(i)))
		must(t, err)
		for _, m := range messages {
			_, err := conn.Write(m)
			must(t, err)
		}
	}
}

// collector runs a program that receives at a port of its own, while f runs, and returns what it said.
func collector(t *testing.T, end os.Signal, f func(to string), command func(port string) []string) string {
	t.Helper()
	l, err := net.ListenPacket("udp4", "127.0.0.1:0")
	must(t, err)
	at := l.LocalAddr().(*net.UDPAddr)
	must(t, l.Close())
	args := command(fmt.Sprint(at.Port))
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatalf("%v (tools/deps.sh test installs it)", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }()
	inode := fmt.Sprintf(" 0100007F:%04X ", at.Port)
	for limit := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile("/proc/net/udp")
		must(t, err)
		if strings.Contains(string(b), inode) {
			break
		}
		select {
		case err := <-ended:
			t.Fatalf("%s: %v\n%s", args[0], err, said.String())
		default:
		}
		if time.Now().After(limit) {
			t.Fatalf("%s does not listen\n%s", args[0], said.String())
		}
	}
	f(at.String())
	must(t, cmd.Process.Signal(end))
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatalf("%s does not end\n%s", args[0], said.String())
	}
	return said.String()
}

// read waits until a collector has taken all datagrams out of its socket.
func read(t *testing.T, to string) {
	t.Helper()
	at := netip.MustParseAddrPort(to)
	for limit := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		b, err := os.ReadFile("/proc/net/udp")
		must(t, err)
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); len(f) > 12 && f[1] == fmt.Sprintf("0100007F:%04X", at.Port()) && strings.HasSuffix(f[4], ":00000000") {
				if f[12] != "0" {
					t.Fatalf("the socket of the collector dropped %s datagrams", f[12])
				}
				return
			}
		}
		if time.Now().After(limit) {
			t.Fatal("the collector does not read")
		}
	}
}

// nfdump keeps packets, bytes, addresses and times, and finds no gap in the sequence.
func TestNfdumpReadsFlowRecords(t *testing.T) {
	dir := t.TempDir()
	said := collector(t, syscall.SIGTERM, func(to string) { send(t, to); read(t, to) }, func(port string) []string {
		return []string{"nfcapd", "-b", "127.0.0.1", "-p", port, "-w", dir, "-t", "3600"}
	})
	if !strings.Contains(said, "Sequence Errors: 0, Bad Packets: 0") {
		t.Errorf("nfcapd says:\n%s", said)
	}
	cmd := exec.Command("nfdump", "-R", dir, "-o", "json")
	out, err := cmd.Output()
	must(t, err)
	var flows []struct {
		First   string `json:"first"`
		Last    string `json:"last"`
		Packets uint64 `json:"in_packets"`
		Bytes   uint64 `json:"in_bytes"`
		Source  string `json:"src6_addr"`
		To      string `json:"dst6_addr"`
	}
	if err := json.Unmarshal(out, &flows); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	type key struct{ source, to string }
	type sum struct{ records, packets, bytes uint64 }
	have := map[key]sum{}
	for _, f := range flows {
		const layout = "2006-01-02T15:04:05.000"
		first, err := time.Parse(layout, f.First)
		must(t, err)
		end, err := time.Parse(layout, f.Last)
		must(t, err)
		if end.Sub(first) != time.Minute {
			t.Errorf("a record is about %v", end.Sub(first))
		}
		s := have[key{f.Source, f.To}]
		have[key{f.Source, f.To}] = sum{s.records + 1, s.packets + f.Packets, s.bytes + f.Bytes}
	}
	want := map[key]sum{
		{"fc00:1::1", "fc00:0:0:20c::"}: {intervals, 10 * intervals, 1000 * intervals},
		{"fc00:2::1", "fc00:0:0:20c::"}: {intervals, 5 * intervals, 500 * intervals},
		{"::", "fc00:0:0:20d::"}:        {intervals, 7 * intervals, 900 * intervals}, // two headends
		{"::", "::"}:                    {33 * intervals, (3 + 4 + 1 + 30) * intervals, (200 + 30*100) * intervals},
	}
	if diff := cmp.Diff(want, have, cmp.AllowUnexported(key{}, sum{})); diff != "" {
		t.Errorf("(-want +got):\n%s\n%s", diff, said)
	}
}

// pmacct reads the own elements, the SID (RFC 9487), and the status.
func TestPmacctReadsFlowRecords(t *testing.T) {
	dir := t.TempDir()
	out := filepath.Join(dir, "out.json")
	file := func(name, content string) string {
		name = filepath.Join(dir, name)
		must(t, os.WriteFile(name, []byte(content), 0o600))
		return name
	}
	primitives := file("primitives", `name=role field_type=32473:1 len=vlen semantics=str
name=chain field_type=32473:2 len=vlen semantics=str
name=direction field_type=32473:3 len=vlen semantics=str
name=function field_type=32473:6 len=vlen semantics=str
name=reason field_type=32473:7 len=vlen semantics=str
name=status field_type=89 len=1 semantics=u_int
name=segment field_type=495 len=16 semantics=ip
name=behaviour field_type=502 len=2 semantics=u_int
`)
	type row struct{ Role, Chain, Direction, Function, Reason, Status, Segment, Behaviour string }
	type sum struct{ Packets, Bytes uint64 }
	// written is what the file has; pmacct adds to it each second.
	written := func() map[row]sum {
		all := map[row]sum{}
		b, err := os.ReadFile(out)
		if errors.Is(err, os.ErrNotExist) {
			return all
		}
		must(t, err)
		for line := range strings.Lines(string(b)) {
			var r struct {
				row
				sum
			}
			if json.Unmarshal([]byte(line), &r) == nil { // the last line may be half written
				all[r.row] = sum{all[r.row].Packets + r.Packets, all[r.row].Bytes + r.Bytes}
			}
		}
		return all
	}
	// By interval, and of the last one by path.
	want := map[row]sum{
		{Role: "headend", Chain: "web", Direction: "reverse", Status: "64", Segment: "fc00:0:0:20c::", Behaviour: "0"}:                      {5, 500},
		{Role: "endpoint", Chain: "web", Direction: "forward", Function: "fw", Status: "64", Segment: "fc00:0:0:20c::", Behaviour: "32771"}: {10, 1000},
		{Role: "egress", Chain: "web", Direction: "reverse", Status: "64", Segment: "fc00:0:0:20d::", Behaviour: "20"}:                      {7, 900},
		{Role: "endpoint", Chain: "labels", Direction: "forward", Function: "fw", Status: "64", Segment: "::", Behaviour: "0"}:              {3, 200},
		{Role: "headend", Chain: "many", Direction: "forward", Status: "64", Segment: "::", Behaviour: "0"}:                                 {1, 100},
		{Reason: "replay", Status: "128", Segment: "::", Behaviour: "0"}:                                                                    {4, 0},
		{Reason: "replay", Status: "64", Segment: "::", Behaviour: "0"}:                                                                     {1, 0},
	}
	var got map[row]sum
	said := collector(t, syscall.SIGINT, func(to string) {
		// nfacctd hands records on when it has many.
		for limit := time.Now().Add(patience); len(got) < len(want) && time.Now().Before(limit); {
			send(t, to)
			read(t, to)
			got = written()
		}
	}, func(port string) []string {
		return []string{"nfacctd", "-f", file("nfacctd.conf", fmt.Sprintf(`daemonize: false
nfacctd_ip: 127.0.0.1
nfacctd_port: %s
nfacctd_time_new: true
plugins: print[all]
aggregate[all]: role, chain, direction, function, reason, status, segment, behaviour
aggregate_primitives: %s
print_output_file[all]: %s
print_output[all]: json
print_output_file_append[all]: true
print_refresh_time: 1
`, port, primitives, out))}
	})
	// Of each row it has those of some whole intervals.
	for r, one := range want {
		n := got[r].Packets / one.Packets
		want[r] = sum{n * one.Packets, n * one.Bytes}
		if n == 0 {
			t.Errorf("no records of %v", r)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s\n%s", diff, said)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
