package oracle

// Reason is why a packet is refused, by its name in
// bpf/include/waystamp/reasons.h. Reasons that only a failing kernel or a
// broken map gives are not here.
type Reason string

const (
	Truncated       Reason = "TRUNCATED"
	EdgeTruncated   Reason = "EDGE_TRUNCATED"
	PayloadLength   Reason = "PAYLOAD_LENGTH"
	Unconfigured    Reason = "UNCONFIGURED"
	OutsideSID      Reason = "OUTSIDE_SID"
	OutsideSRH      Reason = "OUTSIDE_SRH"
	Unmatched       Reason = "UNMATCHED"
	Unproven        Reason = "UNPROVEN"
	NoSRH           Reason = "NO_SRH"
	RoutingType     Reason = "ROUTING_TYPE"
	SRHTruncated    Reason = "SRH_TRUNCATED"
	SRHLastEntry    Reason = "SRH_LAST_ENTRY"
	SRHSegmentsLeft Reason = "SRH_SEGMENTS_LEFT"
	SRHTooLong      Reason = "SRH_TOO_LONG"
	TLVOverrun      Reason = "TLV_OVERRUN"
	TLVLength       Reason = "TLV_LENGTH"
	TLVAlignment    Reason = "TLV_ALIGNMENT"
	TLVDuplicate    Reason = "TLV_DUPLICATE"
	TLVMissing      Reason = "TLV_MISSING"
	UnknownSID      Reason = "UNKNOWN_SID"
	UnknownPath     Reason = "UNKNOWN_PATH"
	UnknownEpoch    Reason = "UNKNOWN_EPOCH"
	Scheme          Reason = "SCHEME"
	UpperLayer      Reason = "UPPER_LAYER"
	SegmentsRemain  Reason = "SEGMENTS_REMAIN"
	SegmentOutside  Reason = "SEGMENT_OUTSIDE"
	HopLimit        Reason = "HOP_LIMIT"
	Loop            Reason = "LOOP"
	Segments        Reason = "SEGMENTS"
	Proof           Reason = "PROOF"
	Range           Reason = "RANGE"
	Flow            Reason = "FLOW"
	Number          Reason = "NUMBER"
	Replay          Reason = "REPLAY"
	Stale           Reason = "STALE"
	InnerProtocol   Reason = "INNER_PROTOCOL"
	InnerTruncated  Reason = "INNER_TRUNCATED"
	InnerVersion    Reason = "INNER_VERSION"
	InnerHopLimit   Reason = "INNER_HOP_LIMIT"
	EdgeHopLimit    Reason = "EDGE_HOP_LIMIT"
	WrongChain      Reason = "WRONG_CHAIN"
	ECN             Reason = "ECN"
	RNDExhausted    Reason = "RND_EXHAUSTED"
	NoLane          Reason = "NO_LANE"
	ChainMTU        Reason = "CHAIN_MTU"
	TrainTooLong    Reason = "TRAIN_TOO_LONG"
	TrainTooBig     Reason = "TRAIN_TOO_BIG"
	TooBig          Reason = "TOO_BIG"
	NoRoute         Reason = "NO_ROUTE"
	InnerNoRoute    Reason = "INNER_NO_ROUTE"
	OutsideError    Reason = "OUTSIDE_ERROR"
	PathMTU         Reason = "PATH_MTU"
	OutsideSource   Reason = "OUTSIDE_SOURCE"
	Source          Reason = "SOURCE"
	LeakSID         Reason = "LEAK_SID"
	LeakSRH         Reason = "LEAK_SRH"
	LeaveTruncated  Reason = "LEAVE_TRUNCATED"
	Unverified      Reason = "UNVERIFIED"
	OuterFragment   Reason = "OUTER_FRAGMENT"
	ExtensionFirst  Reason = "EXTENSION_FIRST"

	ExtensionTruncated Reason = "EXTENSION_TRUNCATED"
	OptionLength       Reason = "OPTION_LENGTH"
	OptionUnknown      Reason = "OPTION_UNKNOWN"

	MappedAddress Reason = "MAPPED_ADDRESS"
	IP4Length     Reason = "IP4_LENGTH"
	IP4Checksum   Reason = "IP4_CHECKSUM"
	IP6Length     Reason = "IP6_LENGTH"
	PortsUnread   Reason = "PORTS_UNREAD"
	VLANTags      Reason = "VLAN_TAGS"
	InnerAddress  Reason = "INNER_ADDRESS"
	HeaderTooLong Reason = "HEADER_TOO_LONG"
	Argument      Reason = "ARGUMENT"
)

// Reasons are all of them.
func Reasons() []Reason {
	return []Reason{
		Truncated, EdgeTruncated, PayloadLength, Unconfigured, OutsideSID, OutsideSRH, Unmatched, Unproven,
		NoSRH, RoutingType, SRHTruncated, SRHLastEntry, SRHSegmentsLeft, SRHTooLong,
		TLVOverrun, TLVLength, TLVAlignment, TLVDuplicate, TLVMissing,
		UnknownSID, UnknownPath, UnknownEpoch, Scheme, UpperLayer, SegmentsRemain, SegmentOutside, HopLimit, Loop,
		Segments, Proof, Range, Flow, Number, Replay, Stale, InnerProtocol, InnerTruncated, InnerVersion, InnerHopLimit,
		EdgeHopLimit, WrongChain, ECN, RNDExhausted, NoLane, ChainMTU, TrainTooLong, TrainTooBig,
		TooBig, NoRoute, InnerNoRoute, OutsideError, PathMTU, OutsideSource, Source, LeakSID, LeakSRH, LeaveTruncated, Unverified, OuterFragment, ExtensionFirst, ExtensionTruncated, OptionLength, OptionUnknown, MappedAddress, IP4Length, IP4Checksum, IP6Length, PortsUnread, VLANTags,
		InnerAddress, HeaderTooLong, Argument,
	}
}
