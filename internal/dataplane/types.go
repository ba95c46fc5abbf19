package dataplane

import (
	"encoding/binary"
	"structs"
)

// What the maps hold, by the names that the rest of the package uses. bpf2go
// makes the types from bpf/include/waystamp/abi.h.
type (
	wsConfig  = coreTCWsConfig
	wsNode    = coreTCWsNode
	hopKey    = coreTCWsHopKey
	hop       = coreTCWsHop
	sourceKey = coreTCWsSourceKey
	egressKey = coreTCWsEgressKey
	egress    = coreTCWsEgress
	place     = coreTCWsPlace
	headend   = coreTCWsHeadend
	stats     = coreTCWsStats
	ruleset   = coreTCWsRuleset
	port      = coreTCWsPort
	refusal   = coreTCWsRefusal
	proxy     = coreTCWsProxy
	proxyStat = coreTCWsProxyStats
	bucket    = coreTCWsBucket
	cached    = coreTCWsCached
	wsEvent   = coreTCWsEvent

	errorCount = coreTCWsErrors
)

// share is struct ws_share, which bpf2go writes out where it is used.
type share = struct {
	_        structs.HostLayout
	Key      [2]uint64
	BindKey  [2]uint64
	Prime    uint64
	Alpha    uint64
	Lpc      uint64
	LpcShoup uint64
	UpRnd    uint64
	UpCml    uint64
	DownRnd  uint64
	DownCml  uint64
}

// be32 is v such that its bytes in memory are in network order (__be32).
func be32(v uint32) uint32 {
	return binary.NativeEndian.Uint32(binary.BigEndian.AppendUint32(nil, v))
}

// fromBE32 is the number that the bytes of a __be32 are in network order.
func fromBE32(v uint32) uint32 { return be32(v) }

// be64 is v such that its bytes in memory are in network order (__be64).
func be64(v uint64) uint64 {
	return binary.NativeEndian.Uint64(binary.BigEndian.AppendUint64(nil, v))
}
