package controller

import (
	"context"

	"github.com/waystamp/waystamp/internal/metrics"
	"github.com/waystamp/waystamp/internal/scrape"
)

// Names of the metrics below.
const (
	metricLeads     = "waystamp_controller_leads"
	metricRevision  = "waystamp_controller_revision"
	metricSettled   = "waystamp_controller_settled"
	metricProblem   = "waystamp_controller_problem"
	metricStep      = "waystamp_controller_step_seconds"
	metricWaiting   = "waystamp_controller_waiting_nodes"
	metricNodes     = "waystamp_controller_nodes"
	metricConnected = "waystamp_controller_connected_nodes"
	metricChains    = "waystamp_controller_chains"
	metricEpochs    = "waystamp_controller_epochs"
	metricCommits   = "waystamp_controller_commits_total"
	metricTook      = "waystamp_controller_steps_seconds"
	metricDrained   = "waystamp_controller_drained_total"
	metricFailures  = "waystamp_controller_failures_total"
	metricCalls     = "waystamp_controller_calls_total"
	metricRoot      = "waystamp_controller_root_expires_timestamp_seconds"
)

// Metrics is what a controller counts. All but those that say so are there on the one that leads alone.
var Metrics = metrics.Table{
	{Name: metricLeads, Type: metrics.Gauge, Help: "1 if this controller leads, 0 if another one does. On every controller."},
	{Name: metricRevision, Type: metrics.Gauge, Help: "The last revision that a plan got."},
	{Name: metricSettled, Type: metrics.Gauge, Help: "1 if all headends send what the last request asked for."},
	{Name: metricProblem, Type: metrics.Gauge, Help: "1 if what is wanted is not begun; waystamp get nodes says why."},
	{Name: metricStep, Type: metrics.Gauge, Labels: []string{"step"}, Help: "How long the step has lasted that the change is in, prepare or turn; turn also for one that another change went over and that headends have not ended, unless that change is in a step. Absent if nothing is waited for."},
	{Name: metricWaiting, Type: metrics.Gauge, Help: "Nodes that are waited for, by the step or by a turn that another change went over."},
	{Name: metricNodes, Type: metrics.Gauge, Labels: []string{"state"}, Help: "Nodes, by state: ready, behind, refusing, incompatible, away, expected or revoked."},
	{Name: metricConnected, Type: metrics.Gauge, Help: "Nodes that have a connection on which plans come."},
	{Name: metricChains, Type: metrics.Gauge, Labels: []string{"state"}, Help: "Chains, by state: active, preparing, degraded or blocked."},
	{Name: metricEpochs, Type: metrics.Gauge, Labels: []string{"state"}, Help: "Epochs of paths that nodes hold, by state: active, preparing or draining."},
	{Name: metricCommits, Type: metrics.Counter, Labels: []string{"commit"}, Help: "Steps of changes that this controller has recorded: begin, turn, settle, erase, forget, exclude, resume, rotate or problem. On every controller."},
	{Name: metricTook, Type: metrics.Summary, Labels: []string{"step"}, Help: "How long steps have taken that this controller has ended. On every controller."},
	{Name: metricDrained, Type: metrics.Counter, Labels: []string{"by"}, Help: "Generations whose old epochs this controller has had erased, by how it knew that they had drained: numbers, that headends gave out and egresses have seen, or time. On every controller."},
	{Name: metricFailures, Type: metrics.Counter, Help: "How often a change could not go on, for want of the store for instance. On every controller."},
	{Name: metricCalls, Type: metrics.Counter, Labels: []string{"call", "result"}, Help: "Calls that this controller has answered, by what became of them: done, ended, or an error's code. On every controller."},
	{Name: metricRoot, Type: metrics.Gauge, Help: "When the certificate of the CA ends, in seconds since 1970. On every controller."},
}

// ListenMetrics opens a listener for whoever reads metrics. They have names of nodes, and no secrets.
func ListenMetrics(address string) (Listener, error) {
	l, err := scrape.Listen(address)
	return Listener{Listener: l, metrics: true}, err
}

// gauges are the numbers of this moment.
func (c *Controller) gauges(ctx context.Context) (*metrics.Set, error) {
	s := metrics.NewSet(Metrics)
	s.Set(metricRoot, float64(c.rootsNow()[0].NotAfter.Unix()))
	if c.leads() == nil {
		s.Set(metricLeads, 0)
		return s, nil
	}
	s.Set(metricLeads, 1)
	v, err := c.view(ctx)
	if err != nil {
		return nil, err
	}
	s.Set(metricRevision, float64(v.state.Revision))
	d, err := c.describe(ctx)
	if err != nil {
		return nil, err
	}
	s.Set(metricSettled, truth(d.Settled))
	s.Set(metricProblem, truth(d.Problem != ""))
	s.Set(metricWaiting, float64(len(d.WaitingFor)))
	if d.Step != "" {
		s.Set(metricStep, c.cfg.Now().Sub(d.Since.AsTime()).Seconds(), d.Step)
	}
	connected, _ := c.connected()
	s.Set(metricConnected, float64(len(connected)))
	count := func(name string, all []string, states func(yield func(string))) {
		n := map[string]int{}
		states(func(state string) { n[state]++ })
		for _, state := range all {
			s.Set(name, float64(n[state]), state)
		}
	}
	count(metricNodes, []string{nodeReady, nodeBehind, nodeRefusing, nodeIncompatible, nodeAway, nodeExpected, nodeRevoked}, func(yield func(string)) {
		for _, n := range d.Nodes {
			yield(n.State)
		}
	})
	count(metricChains, []string{chainActive, chainPreparing, chainDegraded, chainBlocked}, func(yield func(string)) {
		for _, ch := range d.Chains {
			yield(ch.State)
		}
	})
	count(metricEpochs, []string{epochActive, epochPreparing, epochDraining}, func(yield func(string)) {
		for _, e := range d.Epochs {
			yield(e.State)
		}
	})
	return s, nil
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// serveMetrics answers readers of metrics until ctx ends.
func (c *Controller) serveMetrics(ctx context.Context, l Listener) error {
	return scrape.Serve(ctx, l.Listener, Metrics, func(ctx context.Context) ([]*metrics.Set, error) {
		now, err := c.gauges(ctx)
		return []*metrics.Set{c.counted, now}, err
	})
}
