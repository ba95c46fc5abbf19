/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Directs every new TCP connection that comes to the namespace of a function on byte streams by
 * the node's interface to the worker. Attached to the namespace (sk_lookup); it needs nothing from
 * the plan.
 */
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_helpers.h>
#include <waystamp/abi.h>

#define LISTENER_IP6 0
#define LISTENER_IP4 1

#define FAMILY_IP4 2 /* AF_INET */
#define PROTOCOL_TCP 6

/* The worker's listeners, one for each version of IP: the kernel spreads connections over
 * the other listeners on the same port. The kernel removes a closed listener from the map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 2);
} ws_listeners SEC(".maps");

/* Index of the interface, in the namespace, that leads to the node. Other interfaces lead to a function
 * that gets plain connections, and opens none.
 */
volatile const __u32 ws_from_node = 0;

SEC("sk_lookup")
int ws_stream_lookup(struct bpf_sk_lookup *ctx)
{
	__u32 key = ctx->family == FAMILY_IP4 ? LISTENER_IP4 : LISTENER_IP6;
	struct bpf_sock *sk;
	long rc;

	if (ctx->protocol != PROTOCOL_TCP ||
	    ctx->ingress_ifindex != ws_from_node)
		return SK_DROP; /* TCP answers with RST */
	/* Without a listener the kernel answers with RST. */
	sk = bpf_map_lookup_elem(&ws_listeners, &key);
	if (!sk)
		return SK_PASS;
	rc = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	return rc ? SK_DROP : SK_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
