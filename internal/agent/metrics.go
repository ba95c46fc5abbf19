package agent

import (
	"context"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/metrics"
)

// Names of the metrics below.
const (
	metricReady      = "waystamp_agent_ready"
	metricInfo       = "waystamp_agent_info"
	metricError      = "waystamp_agent_error"
	metricProblems   = "waystamp_agent_problems"
	metricWarnings   = "waystamp_agent_warnings"
	metricRevision   = "waystamp_plan_revision"
	metricSince      = "waystamp_plan_since_timestamp_seconds"
	metricExpires    = "waystamp_certificate_expires_timestamp_seconds"
	metricEndExpires = "waystamp_end_certificate_expires_timestamp_seconds"
	metricLeft       = "waystamp_path_numbers_left"
	metricAhead      = "waystamp_path_numbers_ahead"
	metricSaved      = "waystamp_windows_saved_timestamp_seconds"
	metricSessions   = "waystamp_gateway_sessions"
	metricRequests   = "waystamp_gateway_requests_total"
	metricGateway    = "waystamp_gateway_refused_total"
	metricAttached   = "waystamp_interface_attached"
	metricEpoch      = "waystamp_path_epoch"
	metricEpochs     = "waystamp_path_epochs"
	metricSummed     = "waystamp_paths_summed"
	metricPackets    = "waystamp_packets_total"
	metricFrames     = "waystamp_frames_total"
	metricBytes      = "waystamp_bytes_total"
	metricRefused    = "waystamp_refused_packets_total"
	metricReported   = "waystamp_reported_packets_total"
	metricErrors     = "waystamp_icmp_errors_total"
	metricUnsent     = "waystamp_icmp_errors_unsent_total"
	metricFunction   = "waystamp_function_packets_total"
	metricWaited     = "waystamp_function_seconds"
	metricWorker     = "waystamp_worker_up"
	metricRestarts   = "waystamp_worker_restarts_total"
	metricOpen       = "waystamp_worker_connections"
	metricConns      = "waystamp_worker_connections_total"
	metricWorkerData = "waystamp_worker_bytes_total"
	metricReaders    = "waystamp_event_readers"
	metricMissed     = "waystamp_events_missed_total"
	metricFlows      = "waystamp_flow_messages_total"
)

// pathLabels name a role of the node in a path.
var pathLabels = []string{"role", "chain", "direction", "function"}

// numberLabels name a headend's path.
var numberLabels = []string{"chain", "direction"}

// Metrics is what an agent tells of its node.
var Metrics = metrics.Table{
	{Name: metricReady, Type: metrics.Gauge, Help: "1 if the whole plan is in force, 0 if parts of it are not."},
	{Name: metricInfo, Type: metrics.Gauge, Labels: []string{"node", "data_path", "plan"}, Help: "1; its labels say which node it is, the name of its data path (--instance), and the digest of the plan file in force."},
	{Name: metricError, Type: metrics.Gauge, Help: "1 if the latest plan was refused, or something else does not work; waystamp status says what."},
	{Name: metricProblems, Type: metrics.Gauge, Help: "Parts of the plan that are not in force."},
	{Name: metricWarnings, Type: metrics.Gauge, Help: "Warnings, as in waystamp status."},
	{Name: metricRevision, Type: metrics.Gauge, Help: "The revision of the plan in force; 0 if it is not a controller's."},
	{Name: metricSince, Type: metrics.Gauge, Help: "When that plan came into force, in seconds since 1970."},
	{Name: metricExpires, Type: metrics.Gauge, Help: "When the node's certificate ends, in seconds since 1970; it is renewed after half its life, so that one that ends soon says that the controller has not been reached. Absent if the node has no controller."},
	{Name: metricEndExpires, Type: metrics.Gauge, Labels: []string{"function"}, Help: "When the certificate of the node's end of sealed parts ends, by function, in seconds since 1970; 0 if it has none. It is renewed before half of its day is over. Absent if no plan of a controller has such an end."},
	{Name: metricAttached, Type: metrics.Gauge, Labels: []string{"interface", "role", "hook"}, Help: "1 if the program at this hook of an interface is attached: tc, xdp or tc_egress; 0 if it is not, of xdp also where the plan or the device wants none."},
	{Name: metricEpoch, Type: metrics.Gauge, Labels: pathLabels, Help: "The latest epoch of the path that the node holds in this role. After 255 comes 0."},
	{Name: metricEpochs, Type: metrics.Gauge, Labels: pathLabels, Help: "How many epochs of the path it holds in this role; more than one while it changes."},
	{Name: metricSummed, Type: metrics.Gauge, Help: "1 if the node has parts in so many paths that chain, direction and function are empty, and each role is summed."},
	{Name: metricPackets, Type: metrics.Counter, Labels: pathLabels, Help: "Packets that the node has sent into a path, stamped or verified, by its role. A super-packet is one."},
	{Name: metricFrames, Type: metrics.Counter, Labels: pathLabels, Help: "The same in frames on a wire."},
	{Name: metricBytes, Type: metrics.Counter, Labels: pathLabels, Help: "Bytes of the inner packets."},
	{Name: metricRefused, Type: metrics.Counter, Labels: []string{"reason"}, Help: "Packets that were refused, by reason; those reasons that occurred."},
	{Name: metricReported, Type: metrics.Counter, Labels: []string{"reason"}, Help: "Packets that would have been refused, and went on: on-violation report, or guard audit."},
	{Name: metricErrors, Type: metrics.Counter, Labels: []string{"type"}, Help: "ICMP errors that the programs have sent: too_big, time_exceeded, parameter_problem or unreachable."},
	{Name: metricUnsent, Type: metrics.Counter, Labels: []string{"why"}, Help: "ICMP errors that were not sent: suppressed by their rate, or unanswerable for want of a receiver."},
	{Name: metricFunction, Type: metrics.Counter, Labels: []string{"function", "what"}, Help: "What became of packets at a function that knows nothing of segment routing; the words are those of waystamp get functions."},
	{Name: metricWaited, Type: metrics.Summary, Labels: []string{"function"}, Help: "How long packets were in the function."},
	{Name: metricWorker, Type: metrics.Gauge, Labels: []string{"function"}, Help: "1 if the worker of a function on byte streams, or of a gateway, runs."},
	{Name: metricRestarts, Type: metrics.Counter, Labels: []string{"function"}, Help: "How often that worker was started again."},
	{Name: metricOpen, Type: metrics.Gauge, Labels: []string{"function"}, Help: "Connections that are open there."},
	{Name: metricConns, Type: metrics.Counter, Labels: []string{"function", "what"}, Help: "Connections that were opened, and what became of others: refused, ended, unreached, reset_by_client, reset_by_server, reset_by_function or reset_by_limit."},
	{Name: metricWorkerData, Type: metrics.Counter, Labels: []string{"function", "direction", "side"}, Help: "Bytes on these connections to_server or to_client: in are read from the sender, out written to the receiver."},
	{Name: metricLeft, Type: metrics.Gauge, Labels: numberLabels, Help: "Packet numbers that a headend has left in the path's latest epoch; at 0 it refuses packets as exhausted, until the path gets a new epoch. Of paths that look the same the least."},
	{Name: metricAhead, Type: metrics.Gauge, Labels: numberLabels, Help: "Of these, those that it may use while no agent runs."},
	{Name: metricSaved, Type: metrics.Gauge, Help: "When the replay windows were last saved as they were, in seconds since 1970. After a reboot the node may accept again what it has accepted since. Absent before the first time."},
	{Name: metricSessions, Type: metrics.Gauge, Labels: []string{"service"}, Help: "Sessions that are open at the node's gateway, by service."},
	{Name: metricRequests, Type: metrics.Counter, Labels: []string{"service"}, Help: "Requests that the gateway has let in since its process was started; a session of bytes that it does not read is one."},
	{Name: metricGateway, Type: metrics.Counter, Labels: []string{"reason"}, Help: "Clients and requests that the gateway has refused since its process was started, by the reasons of its audit log; those that occurred."},
	{Name: metricReaders, Type: metrics.Gauge, Help: "Readers of events, as waystamp watch."},
	{Name: metricMissed, Type: metrics.Counter, Help: "Events that some reader was too slow for."},
	{Name: metricFlows, Type: metrics.Counter, Labels: []string{"what"}, Help: "Messages with flow records (--ipfix): sent, or failed where the network reported an error. UDP reports few."},
}

// pathsMax is how many roles in paths have numbers of their own.
const pathsMax = 1000

// metrics are the numbers of this moment.
func (a *agent) metrics(context.Context) ([]*metrics.Set, error) {
	interfaces, err := a.dp.Interfaces()
	if err != nil {
		return nil, err
	}
	counts, err := a.dp.Counters()
	if err != nil {
		return nil, err
	}
	s := a.status.get()
	s.Interfaces, s.Readers = wireEach(interfaces, wireInterface), a.readers.get()
	revision := uint64(0)
	if p := a.inForce.Load(); p != nil {
		revision = p.Revision
	}
	m := measure(s, revision, wireCounters(s.Node, counts), a.streamsOf())
	if a.cfg.Flows.Collector.IsValid() {
		m.Add(metricFlows, a.flows.sent.Load(), "sent")
		m.Add(metricFlows, a.flows.failed.Load(), "failed")
	}
	numbers, err := a.dp.Numbers()
	if err != nil {
		return nil, err
	}
	measureNumbers(m, s.Paths, numbers)
	if at := a.savedAt.Load(); at != 0 {
		m.Set(metricSaved, float64(at)/1e9)
	}
	a.measureGateway(m)
	if a.cfg.CertificateEnds != nil {
		m.Set(metricExpires, float64(a.cfg.CertificateEnds().Unix()))
	}
	a.measureEnds(m)
	return []*metrics.Set{m}, nil
}

// measureEnds adds until when the certificates of the node's ends are valid.
func (a *agent) measureEnds(m *metrics.Set) {
	n := a.inForce.Load()
	if a.cfg.EndCertificate == nil || n == nil {
		return
	}
	for function, name := range n.CertifiedEnds() {
		var at float64
		if ends := a.cfg.EndCertificate(name); !ends.IsZero() {
			at = float64(ends.Unix())
		}
		m.Set(metricEndExpires, at, function)
	}
}

func measure(s api.Status, revision uint64, c api.Counters, streams map[string]*api.Stream) *metrics.Set {
	m := metrics.NewSet(Metrics)
	m.Set(metricReady, truth(s.Ready))
	m.Set(metricInfo, 1, s.Node, s.Instance, s.Plan)
	m.Set(metricError, truth(s.Error != ""))
	m.Set(metricProblems, float64(len(s.Problems)))
	m.Set(metricWarnings, float64(len(s.Warnings)))
	m.Set(metricRevision, float64(revision))
	m.Set(metricSince, float64(s.Since.Unix()))
	for _, i := range s.Interfaces {
		m.Set(metricAttached, truth(i.TC), i.Name, i.Role, "tc")
		m.Set(metricAttached, truth(i.XDP), i.Name, i.Role, "xdp")
		m.Set(metricAttached, truth(i.Out), i.Name, i.Role, "tc_egress")
	}
	measurePaths(m, s.Paths, c.Paths)
	for _, r := range c.Refusals {
		m.Add(metricRefused, r.Dropped, r.Reason)
		m.Add(metricReported, r.Reported, r.Reason)
	}
	for what, n := range map[string]uint64{
		"too_big": c.Errors.TooBig, "time_exceeded": c.Errors.TimeExceeded, "parameter_problem": c.Errors.Parameter, "unreachable": c.Errors.Unreachable,
	} {
		m.Add(metricErrors, n, what)
	}
	m.Add(metricUnsent, c.Errors.Suppressed, "suppressed")
	m.Add(metricUnsent, c.Errors.Unanswerable, "unanswerable")
	for _, f := range c.Functions {
		for what, n := range map[string]uint64{
			"rx_success": f.RxSuccess, "rx_ignored": f.RxIgnored, "rx_cut": f.RxCut, "rx_copies": f.RxCopies,
			"tx_success": f.TxSuccess, "tx_ignored": f.TxIgnored, "tx_not_cached": f.TxNotCached, "tx_plain": f.TxPlain,
			"tx_originated": f.TxOriginated, "bypassed": f.Bypassed, "tx_cut": f.TxCut, "expired": f.Expired, "evicted": f.Evicted,
		} {
			m.Add(metricFunction, n, f.Function, what)
		}
		m.AddAll(metricWaited, float64(f.WaitedNs)/1e9, f.TxSuccess, f.Function)
	}
	for name, w := range streams {
		m.Set(metricWorker, truth(w.Worker != 0), name)
		m.Add(metricRestarts, uint64(w.Restarts), name)
		m.Set(metricOpen, float64(w.Now), name)
		for what, n := range map[string]uint64{
			"opened": w.Opened, "refused": w.Refused, "ended": w.Ended, "unreached": w.Unreached, "reset_by_client": w.ResetByClient,
			"reset_by_server": w.ResetByServer, "reset_by_function": w.ResetByFunction, "reset_by_limit": w.ResetByLimit,
		} {
			m.Add(metricConns, n, name, what)
		}
		for direction, b := range map[string]api.StreamBytes{"to_server": w.ToServer, "to_client": w.ToClient} {
			m.Add(metricWorkerData, b.In, name, direction, "in")
			m.Add(metricWorkerData, b.Out, name, direction, "out")
		}
	}
	m.Set(metricReaders, float64(s.Readers.Now))
	m.Add(metricMissed, s.Readers.Missed)
	return m
}

// measurePaths has the roles of the node, each by itself if they are not too many.
func measurePaths(m *metrics.Set, held []api.PathState, counted []api.Path) {
	summed := len(held) > pathsMax || len(counted) > pathsMax
	m.Set(metricSummed, truth(summed))
	for _, p := range counted {
		labels := []string{p.Role, p.Chain, p.Direction, p.Function}
		if summed {
			labels = []string{p.Role, "", "", ""}
		}
		m.Add(metricPackets, p.Packets, labels...)
		m.Add(metricFrames, p.Frames, labels...)
		m.Add(metricBytes, p.Bytes, labels...)
	}
	if summed {
		return
	}
	type role struct{ role, chain, direction, function string }
	epochs := map[role]map[uint8]bool{}
	latest := map[role]uint8{}
	for _, p := range held {
		r := role{p.Role, p.Chain, p.Direction, p.Function}
		e := uint8(p.Epoch)
		if epochs[r] == nil {
			epochs[r], latest[r] = map[uint8]bool{}, e
		}
		epochs[r][e] = true
		if olderEpoch(latest[r], e) {
			latest[r] = e
		}
	}
	for r, all := range epochs {
		m.Set(metricEpoch, float64(latest[r]), r.role, r.chain, r.direction, r.function)
		m.Set(metricEpochs, float64(len(all)), r.role, r.chain, r.direction, r.function)
	}
}

// measureNumbers has how far the headends have counted, each path by itself if they are not too many.
func measureNumbers(m *metrics.Set, held []api.PathState, numbers []dataplane.NumberState) {
	of := map[uint32]api.PathState{}
	for _, p := range held {
		if p.Role == api.RoleHeadend {
			of[p.Path] = p
		}
	}
	latest := map[uint32]dataplane.NumberState{}
	for _, n := range numbers {
		if was, ok := latest[n.Path]; !ok || olderEpoch(was.Epoch, n.Epoch) {
			latest[n.Path] = n
		}
	}
	type least struct{ left, ahead uint64 }
	by := map[[2]string]least{}
	for path, n := range latest {
		p, ok := of[path]
		if !ok {
			continue // the plan has just changed
		}
		labels := [2]string{p.Chain, p.Direction}
		if len(held) > pathsMax {
			labels = [2]string{}
		}
		if was, ok := by[labels]; ok {
			n.Left, n.Ahead = min(n.Left, was.left), min(n.Ahead, was.ahead)
		}
		by[labels] = least{n.Left, n.Ahead}
	}
	for labels, n := range by {
		m.Set(metricLeft, float64(n.left), labels[:]...)
		m.Set(metricAhead, float64(n.ahead), labels[:]...)
	}
}

// measureGateway has what the node's gateway tells of itself. Its process is not trusted: services and reasons are those
// that there are.
func (a *agent) measureGateway(m *metrics.Set) {
	g, w, _ := a.gatewayNow()
	if g == nil || w == nil {
		return
	}
	counts := w.Counts()
	for _, s := range g.Services {
		m.Set(metricSessions, float64(counts[s.Name].Sessions), s.Name)
		m.Add(metricRequests, counts[s.Name].Requests, s.Name)
	}
	refused := w.Refused()
	for _, reason := range gateway.Reasons() {
		if n := refused[reason]; n > 0 {
			m.Add(metricGateway, n, string(reason))
		}
	}
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
