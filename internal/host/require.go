package host

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// PermissionError means that the process lacks a permission.
type PermissionError struct {
	Capability string // CAP_NET_ADMIN
	For        string // the purpose
}

func (e *PermissionError) Error() string {
	return fmt.Sprintf("no permission to %s: %s is missing; run as root", e.For, e.Capability)
}

// Is makes a PermissionError an fs.ErrPermission.
func (e *PermissionError) Is(target error) bool { return target == fs.ErrPermission }

// UnsupportedError means that the running kernel lacks a feature.
type UnsupportedError struct {
	Feature string
	Config  string // the kernel option or parameter for it; "": see Min
	Min     string // the first Linux version that has it
}

func (e *UnsupportedError) Error() string {
	if e.Config != "" {
		return fmt.Sprintf("this kernel has no %s; it needs %s", e.Feature, e.Config)
	}
	return fmt.Sprintf("this kernel (Linux %s) has no %s: Linux %s is the first that does", kernelRelease(), e.Feature, e.Min)
}

func kernelRelease() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown version"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// Is makes an UnsupportedError an errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// Feature is something that Require can check.
type Feature uint8

const (
	FeatureNetAdmin   Feature = iota // may configure the network
	FeatureNamespaces                // may make network namespaces, and the kernel has them
	FeatureIPv6                      // the kernel speaks it
	FeatureVeth                      // pairs of virtual devices
	FeatureSEG6Local                 // the kernel's own SRv6 behaviours
)

// Features that the kernel may lack.
var (
	noNamespaces = &UnsupportedError{Feature: "network namespaces", Config: "CONFIG_NET_NS"}
	noIPv6       = &UnsupportedError{Feature: "IPv6", Config: "CONFIG_IPV6 and no ipv6.disable=1 on its command line"}
	noVeth       = &UnsupportedError{Feature: "virtual Ethernet pairs", Config: "CONFIG_VETH"}
	noSEG6Local  = &UnsupportedError{Feature: "SRv6 behaviours (seg6local)", Config: "CONFIG_IPV6_SEG6_LWTUNNEL"}
)

var features = map[Feature]struct {
	name  string
	probe func() error
}{
	FeatureNetAdmin: {"network administration", func() error {
		return capable(unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "configure the network")
	}},
	FeatureNamespaces: {noNamespaces.Feature, probeNamespaces},
	FeatureIPv6:       {noIPv6.Feature, probeIPv6},
	FeatureVeth:       {noVeth.Feature, probeVeth},
	FeatureSEG6Local:  {noSEG6Local.Feature, probeSEG6Local},
}

func (f Feature) String() string {
	if v, ok := features[f]; ok {
		return v.name
	}
	return fmt.Sprintf("Feature(%d)", uint8(f))
}

// Require checks that the process and the kernel have these features, in this order, and names
// everything that is missing. It changes nothing: devices and routes are tried in a namespace of
// their own. An error that is neither fs.ErrPermission nor errors.ErrUnsupported means that the
// check itself failed.
func Require(want ...Feature) error {
	var errs []error
	for _, f := range want {
		v, ok := features[f]
		if !ok {
			return fmt.Errorf("require: %s is not known", f)
		}
		err := v.probe()
		if err != nil && !slices.ContainsFunc(errs, func(said error) bool { return said.Error() == err.Error() }) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func capable(number uint, name, purpose string) error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of the process: %w", err)
	}
	if data[number/32].Effective&(1<<(number%32)) == 0 {
		return &PermissionError{Capability: name, For: purpose}
	}
	return nil
}

func probeNamespaces() error {
	if _, err := os.Stat("/proc/self/ns/net"); errors.Is(err, fs.ErrNotExist) {
		return noNamespaces
	} else if err != nil {
		return fmt.Errorf("look for network namespaces: %w", err)
	}
	return capable(unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "make network namespaces")
}

func probeIPv6() error {
	if _, err := os.Stat("/proc/sys/net/ipv6/conf/all"); errors.Is(err, fs.ErrNotExist) {
		return noIPv6
	} else if err != nil {
		return fmt.Errorf("look for IPv6: %w", err)
	}
	return nil
}

func probeVeth() error {
	return inScratch(func(n *Net) error {
		err := n.AddVeth(Veth{Name: "probe-a", PeerName: "probe-b"})
		if errors.Is(err, unix.EOPNOTSUPP) {
			return noVeth
		}
		return err
	})
}

func probeSEG6Local() error {
	return inScratch(func(n *Net) error {
		if err := n.SetUp("lo"); err != nil {
			return err
		}
		err := n.AddRoute(Route{
			Destination: netip.MustParsePrefix("fd00::/64"),
			Type:        RouteEnd,
			Device:      "lo",
		})
		if errors.Is(err, unix.EOPNOTSUPP) {
			return noSEG6Local
		}
		return err
	})
}

func inScratch(f func(*Net) error) error {
	if err := probeNamespaces(); err != nil {
		return err
	}
	if err := capable(unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "configure the network"); err != nil {
		return err
	}
	ns, err := Anonymous()
	if err != nil {
		return err
	}
	defer ns.Close()
	n, err := Open(ns)
	if err != nil {
		return err
	}
	defer n.Close()
	return f(n)
}

// permission adds the remedy to a refusal of the kernel.
func permission(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w; this needs CAP_SYS_ADMIN and CAP_NET_ADMIN: run as root", err)
	}
	return err
}
