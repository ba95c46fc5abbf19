package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// A reader of an NFQUEUE (linux/netfilter/nfnetlink_queue.h), and the rule that fills
// one on kernels whose nf_tables has no queue statement (CONFIG_NFT_QUEUE): the target
// of iptables, by nft_compat (CONFIG_NFT_COMPAT).

// attribute is one of netlink's, with its padding.
func attribute(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
	return append(b, make([]byte, -len(b)&3)...)
}

func nested(kind uint16, attributes ...[]byte) []byte {
	return attribute(kind|unix.NLA_F_NESTED, slices.Concat(attributes...))
}

// nfMessage is a message of nfnetlink (linux/netfilter/nfnetlink.h).
func nfMessage(kind, flags uint16, sequence uint32, family byte, resource uint16, attributes ...[]byte) []byte {
	body := slices.Concat(append([][]byte{binary.BigEndian.AppendUint16([]byte{family, 0}, resource)}, attributes...)...)
	b := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = binary.NativeEndian.AppendUint32(b, sequence)
	return append(binary.NativeEndian.AppendUint32(b, 0), body...)
}

// nfSocket is one of nfnetlink in a network namespace.
func nfSocket(ns *host.NetNS) (f *os.File, err error) {
	err = ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		f = os.NewFile(uintptr(fd), "nfnetlink")
		return unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	})
	return f, err
}

// acknowledged sends and reads the kernel's answer to the message with a number.
func acknowledged(f *os.File, sequence uint32, message []byte) error {
	if _, err := f.Write(message); err != nil {
		return err
	}
	if err := f.SetReadDeadline(time.Now().Add(settleTime)); err != nil {
		return err
	}
	buf := make([]byte, 1<<16)
	for {
		n, err := f.Read(buf)
		if err != nil {
			return err
		}
		for b := buf[:n]; len(b) >= unix.SizeofNlMsghdr+4; {
			length := binary.NativeEndian.Uint32(b)
			if binary.NativeEndian.Uint16(b[4:]) == unix.NLMSG_ERROR && binary.NativeEndian.Uint32(b[8:]) == sequence {
				if errno := -int32(binary.NativeEndian.Uint32(b[16:])); errno != 0 {
					return unix.Errno(errno)
				}
				return nil
			}
			b = b[min(len(b), int(length+3)&^3):]
		}
	}
}

// addQueueRule appends a rule with the target NFQUEUE of iptables to a chain.
func addQueueRule(ns *host.NetNS, family byte, table, chain string, queue uint16) error {
	const (
		subsystem     = unix.NFNL_SUBSYS_NFTABLES
		newRule       = subsystem<<8 | unix.NFT_MSG_NEWRULE
		ruleTable     = 1 // NFTA_RULE_TABLE, and so on
		ruleChain     = 2
		ruleExprs     = 4
		listElement   = 1
		exprName      = 1
		exprData      = 2
		targetName    = 1
		targetVersion = 2
		targetInfo    = 3
	)
	// struct xt_NFQ_info_v3: queue, number of queues, flags.
	info := binary.NativeEndian.AppendUint64(nil, 0)
	binary.NativeEndian.PutUint16(info, queue)
	binary.NativeEndian.PutUint16(info[2:], 1)
	target := slices.Concat(
		attribute(targetName, []byte("NFQUEUE\x00")), attribute(targetVersion, []byte{0, 0, 0, 3}), attribute(targetInfo, info))
	const begin, rule, end = 1, 2, 3 // numbers of messages
	f, err := nfSocket(ns)
	if err != nil {
		return err
	}
	defer f.Close()
	return acknowledged(f, rule, slices.Concat(
		nfMessage(unix.NFNL_MSG_BATCH_BEGIN, unix.NLM_F_REQUEST, begin, unix.AF_UNSPEC, subsystem),
		nfMessage(newRule, unix.NLM_F_REQUEST|unix.NLM_F_CREATE|unix.NLM_F_APPEND|unix.NLM_F_ACK, rule, family, 0,
			attribute(ruleTable, []byte(table+"\x00")), attribute(ruleChain, []byte(chain+"\x00")),
			nested(ruleExprs, nested(listElement, attribute(exprName, []byte("target\x00")), nested(exprData, target)))),
		nfMessage(unix.NFNL_MSG_BATCH_END, unix.NLM_F_REQUEST, end, unix.AF_UNSPEC, subsystem)))
}

// queued is a packet in a queue.
type queued struct {
	id      uint32
	payload []byte // from the network header on
}

// readQueue binds to a queue of a namespace and gives a verdict for each packet of it
// until the test ends. whole: super-packets come as they are.
func readQueue(t *testing.T, ns *host.NetNS, queue uint16, whole bool, accept func(queued) bool) {
	t.Helper()
	const (
		config, verdict = unix.NFNL_SUBSYS_QUEUE<<8 | 2, unix.NFNL_SUBSYS_QUEUE<<8 | 1
		command, params = 1, 2 // NFQA_CFG_CMD, NFQA_CFG_PARAMS, and so on
		mask, flags     = 4, 5
		bind, packets   = 1, 2
		wholeFlag       = 4 // NFQA_CFG_F_GSO
		header, data    = 1, 10
		verdictHeader   = 2
		drop, take      = 0, 1 // NF_DROP, NF_ACCEPT
	)
	f, err := nfSocket(ns)
	must(t, err)
	asked := unix.NLM_F_REQUEST | uint16(unix.NLM_F_ACK)
	must(t, acknowledged(f, 1, nfMessage(config, asked, 1, unix.AF_UNSPEC, queue, attribute(command, []byte{bind, 0, 0, 0}))))
	more := [][]byte{attribute(params, []byte{0, 0, 0xff, 0xff, packets})}
	if whole {
		more = append(more, attribute(flags, []byte{0, 0, 0, wholeFlag}), attribute(mask, []byte{0, 0, 0, wholeFlag}))
	}
	must(t, acknowledged(f, 2, nfMessage(config, asked, 2, unix.AF_UNSPEC, queue, more...)))
	must(t, f.SetReadDeadline(time.Time{}))
	done := make(chan error, 1)
	go func() { // until the socket is closed
		buf := make([]byte, 1<<17)
		for {
			n, err := f.Read(buf)
			if errors.Is(err, os.ErrClosed) {
				err = nil
			}
			if n <= 0 || err != nil {
				done <- err
				return
			}
			p, err := parseQueued(buf[:n], header, data)
			if err != nil {
				done <- err
				return
			}
			decided := byte(drop)
			if accept(p) {
				decided = take
			}
			answer := binary.BigEndian.AppendUint32([]byte{0, 0, 0, decided}, p.id)
			if _, err := f.Write(nfMessage(verdict, unix.NLM_F_REQUEST, 0, unix.AF_UNSPEC, queue, attribute(verdictHeader, answer))); err != nil {
				done <- err
				return
			}
		}
	}()
	t.Cleanup(func() {
		if err := errors.Join(f.Close(), <-done); err != nil {
			t.Errorf("queue %d: %v", queue, err)
		}
	})
}

// parseQueued reads the only message in b. The payload is a copy.
func parseQueued(b []byte, header, data uint16) (p queued, err error) {
	const past = unix.SizeofNlMsghdr + 4 // nfnetlink's own header
	if len(b) < past {
		return p, fmt.Errorf("a message of %d bytes", len(b))
	}
	for b = b[past:]; len(b) >= 4; {
		length, kind := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)
		if length < 4 || length > len(b) {
			return p, fmt.Errorf("an attribute of %d bytes, of %d", length, len(b))
		}
		switch kind {
		case header:
			p.id = binary.BigEndian.Uint32(b[4:])
		case data:
			p.payload = slices.Clone(b[4:length])
		}
		b = b[min(len(b), (length+3)&^3):]
	}
	if p.id == 0 || p.payload == nil {
		return p, errors.New("a message without number or payload")
	}
	return p, nil
}
