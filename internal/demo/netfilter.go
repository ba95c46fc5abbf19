package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
)

const netfilterPrologue = `
== the kernel's packet filter as a function ==

    guest ---+      (fw)
             r1 --- r2 --- r3 --- web     chains guests and staff, both ways: r1, fw, r3
    staff ---+

fw is netfilter on r2, in a namespace that r2's agent has made. The argument in the SID
is the packet mark inside: by it the rules tell guests, who may ask the web server,
from staff, who may do more.
`

func (s *stage) netfilterScenes() []scene {
	return []scene{
		{"One firewall tells guests and staff apart",
			"guest and staff connected to ports 80 and 22 of web",
			s.toldApart},
		{"Somebody writes staff's argument into a guest's packets",
			"r1's plan was edited: the segment list of chain guests now has staff's argument; then guest connected to port 22; then the plan was put right",
			s.forgedArgument},
	}
}

// toldApart shows that the argument chooses among the rules.
func (s *stage) toldApart(ctx context.Context) (saw []string, err error) {
	for _, c := range []struct {
		from string
		port uint16
		may  bool
	}{{"guest", 80, true}, {"guest", 22, false}, {"staff", 80, true}, {"staff", 22, true}} {
		limit := settleTime
		if !c.may {
			limit = unansweredTime
		}
		err := s.connectFrom(ctx, c.from, c.port, limit)
		switch {
		case err == nil && c.may:
			saw = append(saw, fmt.Sprintf("%s, port %d: connected", c.from, c.port))
		case err == nil:
			return saw, fmt.Errorf("nothing kept %s from port %d", c.from, c.port)
		case c.may:
			return saw, fmt.Errorf("%s, port %d: %w", c.from, c.port, err)
		default:
			saw = append(saw, fmt.Sprintf("%s, port %d: no answer", c.from, c.port))
		}
	}
	f, err := s.filter(ctx)
	if err != nil {
		return saw, err
	}
	for _, r := range append(f.Rules.Arguments, f.Rules.Counters...) {
		saw = append(saw, fmt.Sprintf("fw has counted %d packets of %s", r.Packets, r.Name))
		if r.Packets == 0 {
			return saw, errors.New("these are none")
		}
	}
	return saw, nil
}

// forgedArgument shows that a field on the wire chooses no rules.
func (s *stage) forgedArgument(ctx context.Context) (saw []string, err error) {
	guests := s.plan.Paths[0]
	forged := guests.Segments()
	b := forged[0].As16()
	b[15] = 2
	forged[0] = netip.AddrFrom16(b)
	if err := s.divert(ctx, guests, forged); err != nil {
		return nil, err
	}
	before, err := s.refusedArguments(ctx)
	if err != nil {
		return nil, err
	}
	if err := s.connectFrom(ctx, "guest", 22, unansweredTime); err == nil {
		return nil, errors.New("guest has connected to port 22")
	}
	after, err := s.refusedArguments(ctx)
	if err != nil {
		return nil, err
	}
	saw = append(saw, fmt.Sprintf("r2 refused %d packets: argument", after-before))
	if after == before {
		return saw, errors.New("r2 has refused none")
	}
	if err := s.divert(ctx, guests, guests.Segments()); err != nil {
		return saw, err
	}
	if err := s.connectFrom(ctx, "guest", 80, settleTime); err != nil {
		return saw, fmt.Errorf("with the plan put right: %w", err)
	}
	return append(saw, "with the plan put right: guest, port 80: connected"), nil
}

func (s *stage) refusedArguments(ctx context.Context) (n uint64, err error) {
	client := s.client("r2")
	defer client.Close()
	c, err := client.Counters(ctx)
	for _, r := range c.Refusals {
		if r.Reason == "argument" {
			n = r.Dropped
		}
	}
	return n, err
}

// filter is what fw has counted.
func (s *stage) filter(ctx context.Context) (api.Function, error) {
	client := s.client("r2")
	defer client.Close()
	f, err := client.Function(ctx, "fw")
	if err == nil && (f.Rules == nil || f.Rules.Error != "") {
		err = fmt.Errorf("fw's counters could not be read: %+v", f.Rules)
	}
	return f, err
}

// connectFrom makes a connection from a host to a port of web.
func (s *stage) connectFrom(ctx context.Context, name string, port uint16, limit time.Duration) error {
	from, err := s.lab.NetNS(name)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := s.lab.NetNS("web")
	if err != nil {
		return err
	}
	defer to.Close()
	_, err = connect(ctx, from, to, netip.AddrPortFrom(s.addr("web"), port), limit)
	return err
}

// connect makes a connection and returns the address that its server sees.
func connect(ctx context.Context, from, to *host.NetNS, at netip.AddrPort, limit time.Duration) (peer netip.Addr, err error) {
	var l net.Listener
	err = to.Do(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", at.String())
		return err
	})
	if err != nil {
		return peer, err
	}
	defer l.Close()
	accepted := make(chan netip.Addr, 1)
	go func() { // until the listener is closed
		defer close(accepted)
		if c, err := l.Accept(); err == nil {
			accepted <- c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			c.Close()
		}
	}()
	err = from.Do(func() error {
		c, err := (&net.Dialer{Timeout: limit}).DialContext(ctx, "tcp", at.String())
		if err == nil {
			c.Close()
		}
		return err
	})
	if err == nil {
		peer = <-accepted
	}
	return peer, err
}
