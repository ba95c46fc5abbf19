package host

import (
	"encoding/binary"
	"fmt"
)

// Offload is something that a device does to packets in the stack's place, or
// that the stack puts off until the device (`ethtool -k`).
type Offload uint8

const (
	TSO             Offload = iota // cut TCP super-packets
	GSO                            // cut super-packets as late as can be
	GRO                            // merge packets on arrival
	ScatterGather                  // take a packet in pieces; GSO needs it
	TransmitSum                    // compute checksums
	offloadsInTotal int     = iota
)

var offloads = [offloadsInTotal]struct {
	name     string
	get, set uint32 // ethtool commands, <linux/ethtool.h>
}{
	TSO:           {"tso", 0x1e, 0x1f},
	GSO:           {"gso", 0x23, 0x24},
	GRO:           {"gro", 0x2b, 0x2c},
	ScatterGather: {"sg", 0x18, 0x19},
	TransmitSum:   {"tx", 0x16, 0x17},
}

func (o Offload) String() string {
	if int(o) < len(offloads) {
		return offloads[o].name
	}
	return fmt.Sprintf("Offload(%d)", uint8(o))
}

// Offload reports whether an offload of a device is on.
func (n *Net) Offload(link string, o Offload) (bool, error) {
	if int(o) >= len(offloads) {
		return false, fmt.Errorf("%s is not known", o)
	}
	on, err := n.ethtool(link, offloads[o].get, 0)
	if err != nil {
		return false, fmt.Errorf("read %s of %s in %s: %w", o, link, n.ns, err)
	}
	return on != 0, nil
}

// SetOffload switches an offload of a device on or off. It is an error if the
// device does not obey.
func (n *Net) SetOffload(link string, o Offload, on bool) error {
	if int(o) >= len(offloads) {
		return fmt.Errorf("%s is not known", o)
	}
	var data uint32
	if on {
		data = 1
	}
	if _, err := n.ethtool(link, offloads[o].set, data); err != nil {
		return fmt.Errorf("set %s of %s in %s: %w", o, link, n.ns, permission(err))
	}
	now, err := n.Offload(link, o)
	if err != nil {
		return err
	}
	if now != on {
		return fmt.Errorf("set %s of %s in %s to %t: the device leaves it as it is", o, link, n.ns, on)
	}
	return nil
}

// ethtool makes an SIOCETHTOOL request that reads or writes one value.
func (n *Net) ethtool(link string, cmd, data uint32) (uint32, error) {
	buf := make([]byte, 8) // struct ethtool_value
	binary.NativeEndian.PutUint32(buf, cmd)
	binary.NativeEndian.PutUint32(buf[4:], data)
	err := n.ethtoolRaw(link, buf)
	return binary.NativeEndian.Uint32(buf[4:]), err
}
