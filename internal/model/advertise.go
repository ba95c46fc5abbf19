package model

import (
	"fmt"
	"net/netip"
)

// Advertise selects the prefixes of a node in the kernel's routing table, from which routing
// daemons take them.
type Advertise uint8

const (
	AdvertiseLocator Advertise = iota // the locator alone
	// AdvertiseSIDs: also each SID that can be used now.
	AdvertiseSIDs
)

var advertiseNames = []string{"locator", "sids"}

func (a Advertise) String() string { return enumString("Advertise", advertiseNames, int(a)) }

// MarshalText implements encoding.TextMarshaler.
func (a Advertise) MarshalText() ([]byte, error) {
	return enumMarshal("set of prefixes", advertiseNames, int(a))
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Advertise) UnmarshalText(b []byte) error {
	return enumUnmarshal(a, "set of prefixes", advertiseNames, b)
}

// SIDMetric is the metric of the agent's routes of SIDs, by which routing daemons distinguish
// them from others. In the kernel a usual route to the same prefix wins over them. FRR reads the
// upper 8 bits of a metric as a distance, so it has no more than 24 bits.
const SIDMetric = 1<<24 - 1

// CheckAdvertise holds that the routes of SIDs are others than the locator's.
func CheckAdvertise(a Advertise, locator netip.Prefix) error {
	if a == AdvertiseSIDs && locator.Bits() >= 64 {
		return fmt.Errorf("needs a locator of /63 or shorter: the only SID of %s is the locator itself", locator)
	}
	return nil
}
