package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of <linux/ethtool.h> that deal with all features of a device.
const (
	ethGetStrings = 0x1b
	ethGetCount   = 0x37 // ETHTOOL_GSSET_INFO
	ethGetFeature = 0x3a
	ethSetFeature = 0x3b

	ethFeatureStrings = 4  // ETH_SS_FEATURES
	ethStringLen      = 32 // ETH_GSTRING_LEN
)

// cutsLate reports whether a device with this feature receives super-packets whole.
func cutsLate(feature string) bool {
	return strings.HasPrefix(feature, "tx-") &&
		(strings.HasSuffix(feature, "-segmentation") || strings.HasPrefix(feature, "tx-gso-"))
}

// CutOnSend makes the kernel cut every kind of super-packet before it reaches a
// device. It is an error if the device does not obey.
func (n *Net) CutOnSend(link string) error {
	on, names, err := n.features(link)
	if err != nil {
		return fmt.Errorf("read the features of %s in %s: %w", link, n.ns, err)
	}
	if len(wholeBy(names, on)) == 0 {
		return nil
	}
	if err := n.ethtoolRaw(link, switchFeatures(names, false, cutsLate)); err != nil {
		return fmt.Errorf("make %s in %s take no super-packets: %w", link, n.ns, permission(err))
	}
	if on, names, err = n.features(link); err != nil {
		return fmt.Errorf("read the features of %s in %s: %w", link, n.ns, err)
	}
	if left := wholeBy(names, on); len(left) > 0 {
		return fmt.Errorf("make %s in %s take no super-packets: the device leaves %s on", link, n.ns, strings.Join(left, ", "))
	}
	return nil
}

// CutsOnSend reports whether the kernel segments every kind of super-packet before it reaches a
// device.
func (n *Net) CutsOnSend(link string) (bool, error) {
	on, names, err := n.features(link)
	if err != nil {
		return false, fmt.Errorf("read the features of %s in %s: %w", link, n.ns, err)
	}
	return len(wholeBy(names, on)) == 0, nil
}

// FeatureOn reports whether a device's feature is on, by the name that `ethtool -k` has in the
// kernel ("rx-lro"). A feature that the kernel does not have is off.
func (n *Net) FeatureOn(link, name string) (bool, error) {
	on, names, err := n.features(link)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil // a device without features
	}
	if err != nil {
		return false, fmt.Errorf("read the features of %s in %s: %w", link, n.ns, err)
	}
	i := slices.Index(names, name)
	return i >= 0 && on[i], nil
}

// Switch switches a feature of a device on or off. It is an error if the device does not obey.
func (n *Net) Switch(link, name string, on bool) error {
	_, names, err := n.features(link)
	if err != nil {
		return fmt.Errorf("read the features of %s in %s: %w", link, n.ns, err)
	}
	if err := n.ethtoolRaw(link, switchFeatures(names, on, func(f string) bool { return f == name })); err != nil {
		return fmt.Errorf("switch %s of %s in %s to %t: %w", name, link, n.ns, on, permission(err))
	}
	now, err := n.FeatureOn(link, name)
	if err == nil && now != on {
		err = fmt.Errorf("switch %s of %s in %s to %t: the device leaves it as it is", name, link, n.ns, on)
	}
	return err
}

// switchFeatures is a struct ethtool_sfeatures: for each 32 features, the ones to change, and their
// new values.
func switchFeatures(names []string, on bool, which func(string) bool) []byte {
	blocks := (len(names) + 31) / 32
	req := make([]byte, 8+8*blocks)
	binary.NativeEndian.PutUint32(req, ethSetFeature)
	binary.NativeEndian.PutUint32(req[4:], uint32(blocks))
	for i, name := range names {
		if which(name) {
			at := req[8+8*(i/32):]
			binary.NativeEndian.PutUint32(at, binary.NativeEndian.Uint32(at)|1<<(i%32))
			if on {
				binary.NativeEndian.PutUint32(at[4:], binary.NativeEndian.Uint32(at[4:])|1<<(i%32))
			}
		}
	}
	return req
}

// wholeBy are the active features that leave super-packets whole.
func wholeBy(names []string, on []bool) []string {
	var out []string
	for i, name := range names {
		if on[i] && cutsLate(name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// features are the kernel's features, and whether each is on for a device.
func (n *Net) features(link string) (on []bool, names []string, err error) {
	count := make([]byte, 20) // struct ethtool_sset_info with one set
	binary.NativeEndian.PutUint32(count, ethGetCount)
	binary.NativeEndian.PutUint64(count[8:], 1<<ethFeatureStrings)
	if err := n.ethtoolRaw(link, count); err != nil {
		return nil, nil, err
	}
	total := int(binary.NativeEndian.Uint32(count[16:]))
	strs := make([]byte, 12+ethStringLen*total) // struct ethtool_gstrings
	binary.NativeEndian.PutUint32(strs, ethGetStrings)
	binary.NativeEndian.PutUint32(strs[4:], ethFeatureStrings)
	binary.NativeEndian.PutUint32(strs[8:], uint32(total))
	if err := n.ethtoolRaw(link, strs); err != nil {
		return nil, nil, err
	}
	// struct ethtool_gfeatures: available, requested, active, never changed.
	blocks := (total + 31) / 32
	have := make([]byte, 8+16*blocks)
	binary.NativeEndian.PutUint32(have, ethGetFeature)
	binary.NativeEndian.PutUint32(have[4:], uint32(blocks))
	if err := n.ethtoolRaw(link, have); err != nil {
		return nil, nil, err
	}
	for i := range total {
		names = append(names, unix.ByteSliceToString(strs[12+ethStringLen*i:][:ethStringLen]))
		active := binary.NativeEndian.Uint32(have[8+16*(i/32)+8:])
		on = append(on, active&(1<<(i%32)) != 0)
	}
	return on, names, nil
}

// ethtoolRaw does an SIOCETHTOOL request on a buffer.
func (n *Net) ethtoolRaw(link string, buf []byte) error {
	if len(link) > NameMax {
		return ErrNoLink
	}
	var req struct { // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(req.name[:], link)
	req.data = unsafe.Pointer(&buf[0])
	err := n.ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
		runtime.KeepAlive(buf)
		if errno != 0 {
			return errno
		}
		return nil
	})
	if errors.Is(err, unix.ENODEV) {
		return ErrNoLink
	}
	return err
}
