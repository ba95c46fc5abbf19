package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/waystamp/waystamp/internal/flowrecords"
)

// FlowExport says where flow records go.
type FlowExport struct {
	Collector  netip.AddrPort // over UDP; invalid: nobody gets records
	Every      time.Duration
	Enterprise uint32 // IANA's private enterprise number of waystamp's own elements; 0: records have none
}

// ParseCollector reads the address of a collector. A name is refused: an agent must start before names resolve.
func ParseCollector(s string) (netip.AddrPort, error) {
	c, err := netip.ParseAddrPort(s)
	if err != nil || c.Port() == 0 || c.Addr().IsUnspecified() {
		return netip.AddrPort{}, fmt.Errorf("%q is no address of a collector; expect ADDRESS:PORT, as in [fd00::9]:4739", s)
	}
	return c, nil
}

// flowsSent counts messages with flow records, and errors that the network reported about them.
type flowsSent struct{ sent, failed atomic.Uint64 }

// exportFlows sends flow records each interval, and what is left when ctx ends. A collector that
// is gone is no error: its records are lost, and counted.
func (a *agent) exportFlows(ctx context.Context) error {
	f := a.cfg.Flows
	node := a.inForce.Load().Name
	r, err := flowrecords.New(node, a.cfg.Instance, f.Enterprise)
	if err != nil {
		return err
	}
	e := exporter{to: f.Collector}
	defer e.close()
	wrong := ""
	say := func(err error) {
		switch {
		case err == nil && wrong != "":
			a.cfg.Log.Info("flow records leave again", "collector", f.Collector)
			wrong = ""
		case err != nil && wrong == "":
			a.cfg.Log.Warn("flow records are lost", "collector", f.Collector, "err", err)
			wrong = err.Error()
		}
	}
	step := func() {
		counts, err := a.dp.Counters()
		if err != nil {
			say(fmt.Errorf("read the counters: %w", err))
			return
		}
		messages, err := r.Messages(time.Now(), a.inForce.Load(), wireCounters(node, counts))
		if err != nil {
			say(err)
			return
		}
		var failed error
		for _, m := range messages {
			if err := e.send(m); err != nil {
				a.flows.failed.Add(1)
				failed = err
				continue
			}
			a.flows.sent.Add(1)
		}
		say(failed)
	}
	tick := time.NewTicker(f.Every)
	defer tick.Stop()
	for {
		step()
		select {
		case <-tick.C:
		case <-ctx.Done():
			step()
			return nil
		}
	}
}

// exporter is a connected UDP socket, opened when it is needed: the way to a collector may come up after the agent.
type exporter struct {
	to   netip.AddrPort
	conn net.Conn
}

func (e *exporter) send(m []byte) error {
	if e.conn == nil {
		conn, err := net.Dial("udp", e.to.String())
		if err != nil {
			return err
		}
		e.conn = conn
	}
	_, err := e.conn.Write(m)
	if err == nil {
		return nil
	}
	// An ICMP error about an earlier message is reported now, and this one has not left.
	if _, again := e.conn.Write(m); again == nil {
		return fmt.Errorf("an earlier message: %w", err)
	}
	return errors.Join(err, e.close())
}

func (e *exporter) close() error {
	if e.conn == nil {
		return nil
	}
	err := e.conn.Close()
	e.conn = nil
	return err
}
