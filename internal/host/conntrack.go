package host

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// netfilterMessage is struct nfgenmsg, of which all but the family is 0.
type netfilterMessage struct{ family uint8 }

func (netfilterMessage) Len() int            { return 4 }
func (m netfilterMessage) Serialize() []byte { return []byte{m.family, 0, 0, 0} }

// TrackAnswered puts the flow of a packet of UDP, which is whole and without options, into
// connection tracking, as one that has been answered and has a mark, for an hour.
func (n *Net) TrackAnswered(packet []byte, mark uint32) error {
	err := n.ns.Do(func() error { return trackAnswered(packet, mark) })
	if err != nil {
		return fmt.Errorf("enter a flow into connection tracking in %s: %w", n.ns, permission(err))
	}
	return nil
}

// trackAnswered adds an entry by ctnetlink (linux/netfilter/nfnetlink_conntrack.h), in the
// thread's namespace.
func trackAnswered(inner []byte, mark uint32) error {
	const (
		subsystem                       = 1 << 8 // NFNL_SUBSYS_CTNETLINK; message 0 makes an entry
		original, reply, status         = 1, 2, 3
		timeout, ofMark                 = 7, 8
		ofAddresses, ofProtocol         = 1, 2
		number, sourcePort, destination = 1, 2, 3
		seenReply, confirmed            = 1 << 1, 1 << 3
		ipv4Source, ipv6Source          = 1, 3 // and the destination's is the next one
	)
	family, at, src, dst, ports := uint8(unix.AF_INET6), ipv6Source, inner[8:24], inner[24:40], inner[40:44]
	if inner[0]>>4 == 4 {
		family, at, src, dst, ports = unix.AF_INET, ipv4Source, inner[12:16], inner[16:20], inner[20:24]
	}
	be32 := func(v uint32) []byte { return binary.BigEndian.AppendUint32(nil, v) }
	nested := func(kind int, children ...*nl.RtAttr) *nl.RtAttr {
		a := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
		for _, c := range children {
			a.AddChild(c)
		}
		return a
	}
	tuple := func(kind int, src, dst, sport, dport []byte) *nl.RtAttr {
		return nested(kind,
			nested(ofAddresses, nl.NewRtAttr(at, src), nl.NewRtAttr(at+1, dst)),
			nested(ofProtocol, nl.NewRtAttr(number, []byte{unix.IPPROTO_UDP}), nl.NewRtAttr(sourcePort, sport), nl.NewRtAttr(destination, dport)))
	}
	req := nl.NewNetlinkRequest(subsystem, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	for _, a := range []nl.NetlinkRequestData{
		netfilterMessage{family},
		tuple(original, src, dst, ports[:2], ports[2:]), tuple(reply, dst, src, ports[2:], ports[:2]),
		nl.NewRtAttr(status, be32(seenReply|confirmed)), nl.NewRtAttr(timeout, be32(3600)), nl.NewRtAttr(ofMark, be32(mark)),
	} {
		req.AddData(a)
	}
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}
