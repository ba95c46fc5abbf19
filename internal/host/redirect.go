package host

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// The generic netlink family "netdev" (include/uapi/linux/netdev.h, Linux 6.3).
const (
	netdevFamily       = "netdev"
	netdevCmdDevGet    = 1
	netdevAttrIfindex  = 1
	netdevAttrFeatures = 3
	netdevXDPBasic     = 1  // has XDP in its driver
	netdevXDPNDOXmit   = 4  // takes redirected frames
	netdevXDPRxSG      = 32 // gives XDP frames in several buffers
)

// TakesRedirects asks the kernel whether a device accepts frames that XDP redirects to it now.
// Other devices drop them without an error: for example a veth whose peer has neither an XDP
// program nor GRO. It asks in the calling thread's namespace.
func TakesRedirects(index int) (bool, error) {
	features, err := xdpFeatures(index)
	if err != nil {
		return false, fmt.Errorf("ask for the XDP features of interface %d: %w", index, err)
	}
	return features&netdevXDPNDOXmit != 0, nil
}

// XDPFeatures is what a device's driver can do at XDP.
type XDPFeatures struct {
	Native  bool // it runs programs
	Buffers bool // a frame may be in several buffers, so that the MTU is not bounded by one
	// Redirects: it accepts frames that programs redirect to it, now.
	Redirects bool
}

// XDPFeatures asks the kernel for them (Linux 6.3).
func (n *Net) XDPFeatures(name string) (f XDPFeatures, err error) {
	l, err := n.Link(name)
	if err != nil {
		return f, err
	}
	err = n.ns.Do(func() error {
		bits, err := xdpFeatures(l.Index)
		f = XDPFeatures{bits&netdevXDPBasic != 0, bits&netdevXDPRxSG != 0, bits&netdevXDPNDOXmit != 0}
		return err
	})
	if err != nil {
		return f, fmt.Errorf("ask for the XDP features of interface %s in %s: %w", name, n.ns, err)
	}
	return f, nil
}

func xdpFeatures(index int) (uint64, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	reply, err := generic(fd, unix.GENL_ID_CTRL, unix.CTRL_CMD_GETFAMILY, unix.CTRL_ATTR_FAMILY_NAME, append([]byte(netdevFamily), 0))
	if err != nil {
		return 0, err
	}
	id := reply[unix.CTRL_ATTR_FAMILY_ID]
	if len(id) != 2 {
		return 0, errors.New("the kernel does not tell the number of its netdev family")
	}
	reply, err = generic(fd, binary.NativeEndian.Uint16(id), netdevCmdDevGet, netdevAttrIfindex, binary.NativeEndian.AppendUint32(nil, uint32(index)))
	if err != nil {
		return 0, err
	}
	f := reply[netdevAttrFeatures]
	if len(f) != 8 {
		return 0, errors.New("the kernel does not tell them")
	}
	return binary.NativeEndian.Uint64(f), nil
}

// generic sends a generic netlink request with one attribute and returns the
// answer's attributes.
func generic(fd int, family uint16, cmd uint8, attr uint16, value []byte) (map[uint16][]byte, error) {
	n := binary.NativeEndian
	body := []byte{cmd, 1, 0, 0} // struct genlmsghdr
	body = n.AppendUint16(body, uint16(unix.SizeofNlAttr+len(value)))
	body = n.AppendUint16(body, attr)
	body = append(body, value...)
	for len(body)%unix.NLMSG_ALIGNTO != 0 {
		body = append(body, 0)
	}
	msg := n.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(body))) // struct nlmsghdr
	msg = n.AppendUint16(msg, family)
	msg = n.AppendUint16(msg, unix.NLM_F_REQUEST)
	msg = append(msg, make([]byte, 8)...) // sequence and port: the kernel's to choose
	if err := unix.Sendto(fd, append(msg, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, err
	}
	buf := make([]byte, 16<<10)
	got, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return nil, err
	}
	buf = buf[:got]
	const headers = unix.SizeofNlMsghdr + 4
	if got < headers {
		return nil, errors.New("the answer is cut short")
	}
	if n.Uint16(buf[4:]) == unix.NLMSG_ERROR {
		return nil, unix.Errno(-int32(n.Uint32(buf[unix.SizeofNlMsghdr:])))
	}
	attrs := map[uint16][]byte{}
	for b := buf[headers:]; len(b) >= unix.SizeofNlAttr; {
		length := int(n.Uint16(b))
		if length < unix.SizeofNlAttr || length > len(b) {
			return nil, errors.New("the answer is damaged")
		}
		attrs[n.Uint16(b[2:])&^uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = b[unix.SizeofNlAttr:length]
		b = b[min(len(b), (length+3)&^3):]
	}
	return attrs, nil
}
