package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prometheus "github.com/prometheus/common/model"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/model"
)

// parsed reads numbers as Prometheus does, by name and labels.
func parsed(t *testing.T, text string) map[string]float64 {
	t.Helper()
	parser := expfmt.NewTextParser(prometheus.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatalf("Prometheus cannot read it: %v\n%s", err, text)
	}
	all := map[string]float64{}
	for name, f := range families {
		for _, m := range f.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			key := name + "{" + strings.Join(labels, ",") + "}"
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				all[key] = m.Counter.GetValue()
			case dto.MetricType_GAUGE:
				all[key] = m.Gauge.GetValue()
			case dto.MetricType_SUMMARY:
				all[key] = m.Summary.GetSampleSum()
				all[key+" count"] = float64(m.Summary.GetSampleCount())
			default:
				t.Errorf("%s is a %s", name, f.GetType())
			}
		}
	}
	return all
}

func written(t *testing.T, sets ...*metrics.Set) map[string]float64 {
	t.Helper()
	var b strings.Builder
	if err := metrics.Write(&b, Metrics, sets...); err != nil {
		t.Fatal(err)
	}
	return parsed(t, b.String())
}

func wants(t *testing.T, all, want map[string]float64) {
	t.Helper()
	for name, n := range want {
		if have, ok := all[name]; !ok || have != n {
			t.Errorf("%s is %v (%t), want %v", name, have, ok, n)
		}
	}
}

// An agent serves what its data path counts, at an address of its own and on its socket.
func TestAnAgentServesMetrics(t *testing.T) {
	n := newNode(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	n.must(err)
	n.cfg.Metrics = l.Addr().String()
	n.must(l.Close())
	n.cfg.CertificateEnds = func() time.Time { return time.Unix(1_800_000_000, 0) }
	p := r1(t, nil)
	p.Revision = 7
	n.write(n.encode(p))
	s := n.start()
	n.set(func() {
		n.counts = dataplane.Counts{
			Refusals: []dataplane.RefusalCount{{Reason: abi.ReasonReplay, Dropped: 5, Reported: 2}},
			Paths:    []dataplane.PathCount{{Role: dataplane.RoleHeadend, Chain: "web", Path: p.Headends[0].Path, Packets: 10, Frames: 12, Bytes: 9000}},
		}
		n.counts.Errors.TooBig = 3
		n.numbers = []dataplane.NumberState{
			{Path: p.Headends[0].Path, Epoch: 1, Left: 900, Ahead: 70}, {Path: p.Headends[0].Path, Epoch: 0, Left: 3, Ahead: 2}, {Path: 12345, Left: 1},
		}
	})
	get := func(c *http.Client, url string) map[string]float64 {
		t.Helper()
		r, err := c.Get(url)
		n.must(err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK || r.Header.Get("Content-Type") != metrics.ContentType {
			t.Fatalf("%s, %v, %v: %s", r.Status, err, r.Header, b)
		}
		return parsed(t, string(b))
	}
	unix := &http.Transport{Dial: func(string, string) (net.Conn, error) { return net.Dial("unix", SocketPath(n.cfg.RunDir)) }}
	defer unix.CloseIdleConnections()
	tcp := &http.Transport{}
	defer tcp.CloseIdleConnections()
	for _, all := range []map[string]float64{
		get(&http.Client{Transport: tcp}, "http://"+n.cfg.Metrics+"/metrics"),
		get(&http.Client{Transport: unix}, "http://agent/metrics"),
	} {
		wants(t, all, map[string]float64{
			"waystamp_agent_ready{}": 1, "waystamp_agent_error{}": 0, "waystamp_plan_revision{}": 7, "waystamp_certificate_expires_timestamp_seconds{}": 1_800_000_000,
			`waystamp_refused_packets_total{reason="replay"}`: 5, `waystamp_reported_packets_total{reason="replay"}`: 2,
			`waystamp_packets_total{role="headend",chain="web",direction="forward",function=""}`: 10,
			`waystamp_frames_total{role="headend",chain="web",direction="forward",function=""}`:  12,
			`waystamp_bytes_total{role="headend",chain="web",direction="forward",function=""}`:   9000,
			`waystamp_path_epoch{role="headend",chain="web",direction="forward",function=""}`:    1,
			`waystamp_path_epochs{role="headend",chain="web",direction="forward",function=""}`:   1,
			`waystamp_icmp_errors_total{type="too_big"}`:                                         3,
			`waystamp_path_numbers_left{chain="web",direction="forward"}`:                        900,
			`waystamp_path_numbers_ahead{chain="web",direction="forward"}`:                       70,
		})
		if n := all[`waystamp_agent_info{node="r1",data_path="`+n.cfg.Instance+`",plan="`+s.status().Plan+`"}`]; n != 1 {
			t.Errorf("no info of this node in %v", all)
		}
	}
	n.must(s.halt())
	// An address that is taken, or none, is said before anything is changed.
	l, err = net.Listen("tcp", n.cfg.Metrics)
	n.must(err)
	defer l.Close()
	n.taken()
	for address, want := range map[string]string{n.cfg.Metrics: "address already in use", ":9464": "expect HOST:PORT"} {
		n.cfg.Metrics = address
		if err := run(t.Context(), n.cfg, n.on); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", address, err, want)
		}
	}
	for _, step := range n.taken() {
		if strings.HasPrefix(step, "apply") {
			t.Errorf("it does %q", step)
		}
	}
}

// All that the table has is written, and numbers of roles that look the same are summed.
func TestMetricsHaveAllOfTheTable(t *testing.T) {
	s := api.Status{Node: "r\"1\n", Interfaces: []api.Interface{{Name: "eth0", Role: "core", XDP: true}}}
	c := api.Counters{Refusals: []api.Refusal{{Reason: "replay"}}, Functions: []api.Function{{Function: "fw", TxSuccess: 4, WaitedNs: 2_500_000_000}}}
	for _, e := range []int{255, 0} {
		s.Paths = append(s.Paths, api.PathState{Role: "endpoint", Chain: "web", Direction: model.Forward.String(), Function: "fw", Epoch: e})
		c.Paths = append(c.Paths, api.Path{Role: "endpoint", Chain: "web", Direction: model.Forward.String(), Function: "fw", Packets: 5})
	}
	streams := map[string]*api.Stream{"gw": {Worker: 1, Restarts: 2, Now: 3, Opened: 4, ToServer: api.StreamBytes{In: 5, Out: 6}}}
	set := measure(s, 1, c, streams)
	var b strings.Builder
	if err := metrics.Write(&b, Metrics, set); err != nil {
		t.Fatal(err)
	}
	for _, m := range Metrics {
		if slices.Contains([]string{metricExpires, metricEndExpires, metricFlows, metricLeft, metricAhead, metricSaved, metricSessions, metricRequests, metricGateway}, m.Name) { // other tests have them
			continue
		}
		if !strings.Contains(b.String(), "\n# TYPE "+m.Name+" "+string(m.Type)+"\n") {
			t.Errorf("%s is missing", m.Name)
		}
	}
	wants(t, parsed(t, b.String()), map[string]float64{
		`waystamp_path_epoch{role="endpoint",chain="web",direction="forward",function="fw"}`: 0, `waystamp_path_epochs{role="endpoint",chain="web",direction="forward",function="fw"}`: 2,
		`waystamp_packets_total{role="endpoint",chain="web",direction="forward",function="fw"}`: 10, `waystamp_function_seconds{function="fw"}`: 2.5, `waystamp_function_seconds{function="fw"} count`: 4,
		`waystamp_interface_attached{interface="eth0",role="core",hook="xdp"}`: 1, `waystamp_interface_attached{interface="eth0",role="core",hook="tc"}`: 0,
		`waystamp_worker_up{function="gw"}`: 1, `waystamp_worker_restarts_total{function="gw"}`: 2, `waystamp_worker_bytes_total{function="gw",direction="to_server",side="out"}`: 6,
	})
	// A node of very many paths has a number per role.
	for range pathsMax {
		c.Paths = append(c.Paths, api.Path{Role: "endpoint", Chain: "x", Packets: 1})
	}
	all := written(t, measure(s, 1, c, nil))
	wants(t, all, map[string]float64{"waystamp_paths_summed{}": 1, `waystamp_packets_total{role="endpoint",chain="",direction="",function=""}`: 10 + pathsMax})
	for name := range all {
		if strings.Contains(name, `chain="x"`) || strings.HasPrefix(name, "waystamp_path_epoch") {
			t.Errorf("%s is there", name)
		}
	}
}

func TestNumbersThatAreLeftAreTheLeast(t *testing.T) {
	held := []api.PathState{
		{Role: "headend", Chain: "web", Direction: "forward", Path: 1}, {Role: "headend", Chain: "web", Direction: "forward", From: "zip", Path: 2},
		{Role: "headend", Chain: "dns", Direction: "reverse", Path: 3}, {Role: "egress", Chain: "ssh", Direction: "forward", Path: 4},
	}
	numbers := []dataplane.NumberState{
		{Path: 1, Epoch: 255, Left: 1, Ahead: 1}, {Path: 1, Epoch: 0, Left: 500, Ahead: 20}, {Path: 2, Epoch: 9, Left: 700, Ahead: 10}, {Path: 3, Epoch: 1, Left: 0, Ahead: 0},
		{Path: 4, Epoch: 1, Left: 5, Ahead: 5},
	}
	m := metrics.NewSet(Metrics)
	measureNumbers(m, held, numbers)
	all := written(t, m)
	wants(t, all, map[string]float64{
		`waystamp_path_numbers_left{chain="web",direction="forward"}`: 500, `waystamp_path_numbers_ahead{chain="web",direction="forward"}`: 10,
		`waystamp_path_numbers_left{chain="dns",direction="reverse"}`: 0, `waystamp_path_numbers_ahead{chain="dns",direction="reverse"}`: 0,
	})
	if len(all) != 4 {
		t.Errorf("got %v, want no others: the node is no headend of theirs", all)
	}
	for range pathsMax {
		held = append(held, api.PathState{Role: "endpoint"})
	}
	m = metrics.NewSet(Metrics)
	measureNumbers(m, held, numbers)
	if all := written(t, m); len(all) != 2 || all[`waystamp_path_numbers_left{chain="",direction=""}`] != 0 {
		t.Errorf("of very many paths: %v", all)
	}
}

// The time is that of the last saving that succeeded.
func TestMetricsTellHowOldTheSavedWindowsAre(t *testing.T) {
	s := newStage(t, patience, 1)
	t.Cleanup(s.end)
	n := newNode(t)
	s.a.dp = fakeDataPath{n.fakeMachine}
	at := func() (float64, bool) {
		sets, err := s.a.metrics(t.Context())
		n.must(err)
		saved, ok := written(t, sets...)["waystamp_windows_saved_timestamp_seconds{}"]
		return saved, ok
	}
	if saved, ok := at(); ok {
		t.Errorf("before the first saving it is %v", saved)
	}
	before := float64(time.Now().UnixNano()) / 1e9
	s.a.saveWindows()
	first, ok := at()
	if !ok || first < before-1 || first > float64(time.Now().UnixNano())/1e9+1 {
		t.Errorf("after a saving it is %v (%t)", first, ok)
	}
	n.set(func() { n.unsaved = errors.New("the disk is full") })
	s.a.saveAfter = time.Time{}
	s.a.saveWindows()
	if later, _ := at(); later != first {
		t.Errorf("a saving that failed moves it from %v to %v", first, later)
	}
	n.set(func() { n.unsaved = nil })
	s.a.saveAfter = time.Time{}
	s.a.saveWindows()
	if later, _ := at(); later <= first {
		t.Errorf("the next one leaves it at %v", later)
	}
}

func TestMetricsTellOfTheGateway(t *testing.T) {
	s, _ := gatewayStage(t)
	m := metrics.NewSet(Metrics)
	s.a.measureGateway(m)
	all := written(t, m)
	wants(t, all, map[string]float64{
		`waystamp_gateway_sessions{service="shop"}`: 2, `waystamp_gateway_requests_total{service="shop"}`: 5, `waystamp_gateway_refused_total{reason="rule-none"}`: 3,
	})
	if len(all) != 3 {
		t.Errorf("got %v; want no service and no reason that its process made up", all)
	}
	s.a.streams.by = nil
	m = metrics.NewSet(Metrics)
	if s.a.measureGateway(m); len(written(t, m)) != 0 {
		t.Error("a gateway that is not there has numbers")
	}
}
