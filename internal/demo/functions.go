package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/lab"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

const functionsPrologue = `
== functions that know nothing of SRv6 ==

                  fw     dpi
                  ||     ||
    h1 --- r1 --- r2 --- r3 --- r6 --- h2      chain web, both ways: r1, fw, dpi, nat, r6
                         nat

fw is an nftables firewall in a namespace of its own, dpi a process that reads frames
from one interface and writes them to another, nat a rule in r3's own kernel that
gives h1's packets another source address. They get plain packets; r2 and r3 keep each
packet's outer header meanwhile, put it back on what returns, and stamp.
`

// The sizes of these scenes. All goes through a program in user space, frame by
// frame.
const (
	functionBytes  = 20_000_000
	unansweredTime = 500 * time.Millisecond // less than until TCP tries again
)

// unaware are the functions, and what they are.
var unaware = []struct{ node, name, is string }{
	{"r2", "fw", "nftables"}, {"r3", "dpi", "user space"}, {"r3", "nat", "r3's kernel"},
}

func (s *stage) functionScenes() []scene {
	web := s.path(model.Forward)
	return []scene{
		{"Traffic goes through functions that know nothing of its chain",
			fmt.Sprintf("h1 pinged h2 %d times, then downloaded %d MB from it by HTTP", pings, functionBytes/1_000_000),
			s.throughFunctions},
		{"What the functions do, they do",
			"h1 connected to port 80 of h2, and then to port 23, which fw's rules forbid",
			s.forbidden},
		{"The firewall answers by itself",
			"fw got a rule that rejects port 22 by a RST in h2's name; then h1 connected to it",
			s.selfMade},
		{"Somebody in the firewall's namespace pretends to be h1",
			"fw's namespace was given h1's address, and pinged h2 from it",
			s.spoofed},
		{"The firewall is bypassed",
			"r1's plan was edited: its segment list now says dpi, nat without fw; then h1 pinged h2; then the plan was put right",
			func(ctx context.Context) ([]string, error) { return s.bypassed(ctx, web) }},
	}
}

// functions are what the proxies have counted, by function.
func (s *stage) functions(ctx context.Context) (map[string]api.Function, error) {
	out := map[string]api.Function{}
	for _, u := range unaware {
		client := s.client(u.node)
		f, err := client.Function(ctx, u.name)
		client.Close()
		if err != nil {
			return nil, err
		}
		out[u.name] = f
	}
	return out, nil
}

// settled is functions when nothing moves any more, such as what ends a
// connection.
func (s *stage) settled(ctx context.Context) (map[string]api.Function, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTime, errors.New("the functions' counters do not come to rest"))
	defer cancel()
	before, err := s.functions(ctx)
	for err == nil {
		if err = wait(ctx, 100*time.Millisecond); err != nil {
			return nil, context.Cause(ctx)
		}
		var now map[string]api.Function
		if now, err = s.functions(ctx); err != nil {
			break
		}
		still := true
		for name, f := range now {
			still = still && f.RxSuccess == before[name].RxSuccess && f.TxSuccess == before[name].TxSuccess
		}
		if still {
			return now, nil
		}
		before = now
	}
	return nil, err
}

// allBack is functions when all that went in has come back, such as what ends a
// connection; or after a time in which it should have.
func (s *stage) allBack(ctx context.Context) (map[string]api.Function, error) {
	deadline := time.Now().Add(settleTime)
	for {
		counts, err := s.functions(ctx)
		if err != nil {
			return nil, err
		}
		under := false
		for _, f := range counts {
			under = under || f.RxSuccess != f.TxSuccess
		}
		if !under || time.Now().After(deadline) {
			return counts, nil
		}
		if err := wait(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// throughFunctions is traffic as it should be: all that went into a function came
// back, and got its own header.
func (s *stage) throughFunctions(ctx context.Context) (saw []string, err error) {
	if saw, err = s.flow(ctx, functionBytes); err != nil {
		return saw, err
	}
	counts, err := s.allBack(ctx)
	if err != nil {
		return saw, err
	}
	for _, u := range unaware {
		f := counts[u.name]
		saw = append(saw, fmt.Sprintf("%s (%s): %d packets in, %d back and stamped, %d without their header", u.name, u.is, f.RxSuccess, f.TxSuccess, f.TxNotCached))
		if f.RxSuccess == 0 || f.RxSuccess != f.TxSuccess || f.TxNotCached != 0 {
			err = errors.Join(err, fmt.Errorf("%s lost packets: %+v", u.name, f))
		}
	}
	return saw, err
}

// connect tries to connect from h1 to a port of h2, and returns the address that
// h2 sees. limit: for how long.
func (s *stage) connect(ctx context.Context, port uint16, limit time.Duration) (peer netip.Addr, err error) {
	return connect(ctx, s.h1, s.h2, netip.AddrPortFrom(s.h2Addr(), port), limit)
}

// refusedConnection tries to connect to a port of h2, which must not even be
// answered.
func (s *stage) refusedConnection(ctx context.Context, port uint16) (saw string, err error) {
	_, err = s.connect(ctx, port, unansweredTime)
	if err == nil {
		return fmt.Sprintf("port %d: connected", port), errors.New("nothing kept it from connecting")
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return fmt.Sprintf("port %d: no answer", port), nil
	}
	return fmt.Sprintf("port %d: %v", port, err), fmt.Errorf("want no answer: %w", err)
}

// forbidden shows the work of firewall and NAT.
func (s *stage) forbidden(ctx context.Context) (saw []string, err error) {
	peer, err := s.connect(ctx, 80, settleTime)
	if err != nil {
		return nil, err
	}
	saw = append(saw, fmt.Sprintf("port 80: connected; h2 sees %s, which is nat's, and not h1's %s", peer, s.addr("h1")))
	if peer == s.addr("h1") || !peer.IsValid() {
		return saw, errors.New("nat has rewritten nothing")
	}
	before, err := s.settled(ctx)
	if err != nil {
		return saw, err
	}
	line, err := s.refusedConnection(ctx, 23)
	saw = append(saw, line)
	if err != nil {
		return saw, err
	}
	rules, err := s.lab.Run(ctx, "fw", "nft", "list", "ruleset")
	if err != nil {
		return saw, fmt.Errorf("list fw's rules: %w", err)
	}
	after, err := s.functions(ctx)
	if err != nil {
		return saw, err
	}
	for line := range strings.Lines(string(rules)) {
		if strings.Contains(line, "dport 23") {
			saw = append(saw, "fw's own count: "+strings.TrimSpace(line))
		}
	}
	in, out := after["fw"].RxSuccess-before["fw"].RxSuccess, after["fw"].TxSuccess-before["fw"].TxSuccess
	behind := after["dpi"].RxSuccess - before["dpi"].RxSuccess
	saw = append(saw, fmt.Sprintf("r2 handed %d packet to fw and got %d back; dpi saw %d", in, out, behind))
	if in != 1 || out != 0 || behind != 0 || !strings.Contains(string(rules), "tcp dport 23 counter packets 1 ") {
		return saw, errors.New("want one packet, dropped by fw")
	}
	return saw, nil
}

// selfMade is a packet that the function made, and nobody sent into it.
func (s *stage) selfMade(ctx context.Context) (saw []string, err error) {
	said, err := s.lab.Run(ctx, "fw", "nft", "insert", "rule", "ip6", "fw", "forward", "tcp", "dport", "22", "reject", "with", "tcp", "reset")
	if err != nil {
		return nil, fmt.Errorf("change fw's rules: %w: %s", err, said)
	}
	return s.refusal(ctx, "r2", "not-cached", 1, "no header is kept for", func(ctx context.Context) (string, error) {
		return s.refusedConnection(ctx, 22)
	})
}

// spoofed is a packet in h1's name on the interface that r2 gets packets back
// from fw.
func (s *stage) spoofed(ctx context.Context) (saw []string, err error) {
	fw, err := s.lab.Net("fw")
	if err != nil {
		return nil, err
	}
	defer fw.Close()
	h1 := netip.PrefixFrom(s.addr("h1"), 128)
	if err := fw.AddAddress("lo", h1); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, fw.DeleteAddress("lo", h1)) }()
	return s.refusal(ctx, "r2", "not-cached", lostPings, "no header is kept for", func(ctx context.Context) (string, error) {
		return unansweredBy(lab.Ping(ctx, fw.NetNS(), s.h2Addr(), lab.PingConfig{Source: s.addr("h1"), Count: lostPings, Timeout: replyTime}))
	})
}

// bypassed leaves fw out, and puts things right again.
func (s *stage) bypassed(ctx context.Context, web plan.Path) (saw []string, err error) {
	var without []netip.Addr
	for _, h := range web.Hops[1:] {
		if h.Function != "fw" {
			without = append(without, h.SID)
		}
	}
	saw, err = s.refused(func(ctx context.Context) error { return s.divert(ctx, web, without) },
		"segments", "r2 (fw) never stamped this packet")(ctx)
	for _, n := range s.plan.Nodes {
		if n.Name == "r1" && err == nil {
			err = s.follow(ctx, n)
		}
	}
	return saw, err
}
