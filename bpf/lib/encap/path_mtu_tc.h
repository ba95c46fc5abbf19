/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Processes ICMP errors for packets of a headend that were too
 * long. TC only: only nodes inside the domain send such errors.
 */
#pragma once

#include "lib/encap/ext.h"
#include "lib/encap/srh.h"
#include "lib/hook.h"
#include "lib/node/boundary.h"
#include "lib/node/maps.h"
#include "lib/proof/rnd.h"
#include "lib/wire/icmp.h"
#include "lib/wire/net.h"

/* RFC 8201 4: a higher MTU is tried again after ten minutes. */
#define PATH_MTU_LIFE_NS (600 * 1000000000ULL)

/* The quoted packet must be one of this many latest packets: of the last seconds. */
#define PATH_MTU_WINDOW (1ULL << 24)

/* The beginning of an ICMPv6 error about a headend's packet. */
struct quoted_packet {
	struct icmp6_hdr icmp;
	struct ip6_hdr ip6;
	struct srh srh;
};
_Static_assert(sizeof(struct quoted_packet) == 56, "no gaps");

#define QUOTED_SRH (sizeof(struct icmp6_hdr) + sizeof(struct ip6_hdr))

#define QUOTED_OFF (sizeof(struct eth_hdr) + sizeof(struct ip6_hdr))

/* Has this headend used the number a short time ago? Only nodes on the packet's way
 * have seen its number. opot hides the number with masks, so it is not checked.
 */
static __always_inline bool rnd_is_recent(const struct ws_headend *h, __u64 rnd)
{
	__u64 counter = rnd & WS_RND_COUNTER_MAX;
	__u32 lane = rnd >> WS_RND_LANE_SHIFT;
	const struct ws_number *n;

	if (h->scheme == WS_SCHEME_OPOT)
		return true;
	if (lane < h->lane || lane >= h->lane + h->lanes)
		return false;
	n = number_of(h, lane - h->lane);
	return n && counter <= n->last && counter + PATH_MTU_WINDOW > n->last;
}

/* The entry of this node's headend that made the quoted
 * packet t, with the proof tlv; NULL: there is none.
 */
static __always_inline const struct ws_headend *
path_mtu_headend(const struct quoted_packet *t, const struct proof_tlv *tlv)
{
	__be32 path = tlv->path;
	const struct ws_headend *h;
	const __u32 *index;

	index = bpf_map_lookup_elem(&ws_paths, &path);
	if (!index)
		return NULL;
	h = bpf_map_lookup_elem(&ws_headends, index);
	if (!h || h->path != path || h->epoch != tlv->epoch ||
	    h->scheme != tlv->scheme ||
	    h->outer_len != sizeof(t->ip6) + (t->srh.hdrlen + 1) * 8)
		return NULL;
	return rnd_is_recent(h, bpf_be64_to_cpu(tlv->rnd)) ? h : NULL;
}

/* Remembers the MTU of a Packet Too Big for this node. The message then
 * goes up the kernel's stack like any other, which does not use it.
 */
__noinline int ws_path_mtu_learn(struct __sk_buff *skb)
{
	const struct ws_headend *h;
	struct ws_path_mtu *m;
	struct proof_tlv tlv;
	__u32 mtu, n, index;
	struct quoted_packet t;
	__u64 now;
	int ext;

	if (bpf_skb_load_bytes(skb, QUOTED_OFF, &t, sizeof(t)) ||
	    t.icmp.type != ICMP6_TOO_BIG || !ip6_is_ip6(&t.ip6) ||
	    t.ip6.src[0] != cfg.address[0] || t.ip6.src[1] != cfg.address[1] ||
	    !in_block(t.ip6.dst[0]))
		return 0;
	/* A node on the way may have put options before the SRH. */
	ext = ws_ext_skip(skb, QUOTED_OFF + sizeof(t.icmp), t.ip6.nexthdr);
	if (ext < 0 ||
	    (ext && bpf_skb_load_bytes(skb, QUOTED_OFF + QUOTED_SRH + ext,
				       &t.srh, sizeof(t.srh))) ||
	    t.srh.type != ROUTING_TYPE_SRH)
		return 0;
	n = t.srh.last_entry + 1;
	if (bpf_skb_load_bytes(skb, QUOTED_OFF + sizeof(t) + ext + 16 * n, &tlv,
			       sizeof(tlv)) ||
	    !tlv_at_once(&t.srh, n, &tlv))
		return 0;
	h = path_mtu_headend(&t, &tlv);
	if (!h)
		return 0;
	index = h->stats;
	m = bpf_map_lookup_elem(&ws_path_mtus, &index);
	if (!m)
		return 0;
	mtu = bpf_ntohl(t.icmp.data);
	/* RFC 8201 4: every link carries IP6_MIN_MTU, so a lower MTU is not accepted. */
	if (mtu < IP6_MIN_MTU)
		mtu = IP6_MIN_MTU;
	mtu -= h->outer_len + ext;
	now = bpf_ktime_get_coarse_ns();
	/* A lower MTU is still valid: a higher one is not accepted. */
	if (m->path == h->path && m->expires > now && m->mtu < mtu)
		return 0;
	m->path = h->path;
	m->mtu = mtu;
	m->expires = now + PATH_MTU_LIFE_NS;
	return 0;
}
