/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The files of the data path that refuse packets; an event names a line in one of
 * them. Append only: programs that outlive an upgrade still send the old numbers.
 */
#pragma once

/* X(name, folder below bpf/lib or bpf, file): each file has a name of its own. */
#define WS_FILES(X) \
	X(CORE_OUT_TC, "", "core_out_tc.bpf.c") \
	X(CORE_TC, "", "core_tc.bpf.c") \
	X(EDGE_OUT_TC, "", "edge_out_tc.bpf.c") \
	X(EDGE_TC, "", "edge_tc.bpf.c") \
	X(FUNCTION_TC, "", "function_tc.bpf.c") \
	X(DETOUR_BACK_TC, "detour/", "back_tc.h") \
	X(DETOUR_BACK_XDP, "detour/", "back_xdp.h") \
	X(DETOUR_IN_TC, "detour/", "in_tc.h") \
	X(DETOUR_IN_XDP, "detour/", "in_xdp.h") \
	X(DETOUR_LOCAL_OUT_TC, "detour/", "local_out_tc.h") \
	X(DETOUR_OUT_TC, "detour/", "out_tc.h") \
	X(NODE_BOUNDARY, "node/", "boundary.h") \
	X(OUT_FORWARD_TC, "out/", "forward_tc.h") \
	X(PROOF_REPLAY, "proof/", "replay.h") \
	X(PROOF_RND, "proof/", "rnd.h") \
	X(PROOF_VERIFY, "proof/", "verify.h") \
	X(SKB_SEGMENTER, "skb/", "segmenter.h") \
	X(SKB_VLAN, "skb/", "vlan.h") \
	X(SR_DT46_TC, "sr/", "dt46_tc.h") \
	X(SR_DT46_XDP, "sr/", "dt46_xdp.h") \
	X(SR_EDGE_TC, "sr/", "edge_tc.h") \
	X(SR_ENDPOINT, "sr/", "endpoint.h") \
	X(SR_ENDPOINT_TC, "sr/", "endpoint_tc.h") \
	X(ENCAP_EXT_TC, "encap/", "ext_tc.h") \
	X(SR_GUARD_TC, "sr/", "guard_tc.h") \
	X(SR_HEADEND, "sr/", "headend.h") \
	X(SR_HEADEND_OUT_TC, "sr/", "headend_out_tc.h") \
	X(SR_HEADEND_TC, "sr/", "headend_tc.h") \
	X(SR_HEADEND_XDP, "sr/", "headend_xdp.h") \
	X(SR_LEAVE_TC, "sr/", "leave_tc.h") \
	X(ENCAP_SRH, "encap/", "srh.h") \
	X(ENCAP_TLV_TC, "encap/", "tlv_tc.h") \
	X(ENCAP_SRV6, "encap/", "srv6.h") \
	X(ENCAP_SRV6_TC, "encap/", "srv6_tc.h") \
	X(ORIGINATE_TC, "", "originate_tc.bpf.c") \
	X(SR_ENTER_TC, "sr/", "enter_tc.h") \
	X(STREAM_TC, "", "stream_tc.bpf.c") \
	X(STREAM_IN_TC, "stream/", "stream_in_tc.h") \
	X(MPLS_TC, "", "mpls_tc.bpf.c") \
	X(ENCAP_MPLS, "encap/", "mpls.h") \
	X(ENCAP_LABELS_TC, "encap/", "labels_tc.h") \
	X(GATEWAY_TC, "", "gateway_tc.bpf.c") \
	X(STREAM_CONN_TC, "stream/", "conn_tc.h") \
	X(MPLS_OUT_TC, "", "mpls_out_tc.bpf.c") \
	X(DETOUR_BACK_LABELS_TC, "detour/", "back_labels_tc.h")

enum ws_file {
	WS_FILE_NONE,
#define X(name, folder, file) WS_FILE_##name,
	WS_FILES(X)
#undef X
	WS_FILE_COUNT /* not a file */
};
