package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

const netfilterPrologue = `
== the kernel's packet filter as a function ==

    guest ---+      (fw)
             r1 --- r2 --- r3 --- web     chains guests and staff, both ways: r1, fw, r3
    staff ---+

fw is netfilter on r2, in a namespace that r2's agent has made. The argument in the SID
is the packet mark inside: by it the rules tell guests, who may ask the web server,
from staff, who may do more. What it rejects is answered at once.
`

func (s *stage) netfilterScenes() []scene {
	return []scene{
		{"One firewall tells guests and staff apart",
			"guest and staff connected to ports 80 and 22 of web",
			s.toldApart},
		{"A reject reaches the client with a proof",
			"guest connected to port 22 of web; fw's rules reject that by a RST, which nobody has sent through the chain",
			s.rejected},
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
		err := s.connectFrom(ctx, c.from, c.port, settleTime)
		switch {
		case err == nil && c.may:
			saw = append(saw, fmt.Sprintf("%s, port %d: connected", c.from, c.port))
		case err == nil:
			return saw, fmt.Errorf("nothing kept %s from port %d", c.from, c.port)
		case c.may:
			return saw, fmt.Errorf("%s, port %d: %w", c.from, c.port, err)
		case !errors.Is(err, unix.ECONNREFUSED):
			return saw, fmt.Errorf("%s, port %d: %w; want it refused at once", c.from, c.port, err)
		default:
			saw = append(saw, fmt.Sprintf("%s, port %d: connection refused", c.from, c.port))
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

// rejected shows that what netfilter makes itself takes the rest of its chain.
func (s *stage) rejected(ctx context.Context) (saw []string, err error) {
	var rest plan.Path
	for _, p := range s.plan.Paths {
		if p.Chain == "guests" && p.Direction == model.Reverse && p.From == "fw" {
			rest = p
		}
	}
	before, err := s.verified(ctx, rest)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	err = s.connectFrom(ctx, "guest", 22, settleTime)
	if !errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("guest, port 22: %w; want it refused", err)
	}
	saw = append(saw, fmt.Sprintf("guest, port 22: connection refused after %.1f ms", time.Since(started).Seconds()*1000))
	after, err := s.verified(ctx, rest)
	if err != nil {
		return saw, err
	}
	saw = append(saw, fmt.Sprintf("r1 has verified %d packet with a proof of chain %s, %s", after-before, rest.Chain, rest.Way()))
	if after-before != 1 {
		return saw, errors.New("want one")
	}
	return saw, nil
}

// verified is how many packets the egress of a path has verified.
func (s *stage) verified(ctx context.Context, p plan.Path) (n uint64, err error) {
	client := s.client(p.Hops[len(p.Hops)-1].Node)
	defer client.Close()
	c, err := client.Counters(ctx)
	for _, counted := range c.Paths {
		if counted.Path == p.Path && counted.Role == api.RoleEgress {
			n += counted.Packets
		}
	}
	return n, err
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
