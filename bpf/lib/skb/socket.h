/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A packet that a socket of this machine sent, over veth from a container,
 * belongs to that socket until an IP stack receives it; on our way this is
 * the receiver's. The kernel does not account for the room that it adds to
 * the head of such a packet, and a TCP receiver runs into a WARN for each
 * one: it is printed once, but costs a trap each time. TC only.
 */
#pragma once

#include "lib/hook.h"

/* Is this socket a TCP connection? Only TCP receivers account so strictly. */
static __always_inline bool socket_is_tcp(const struct __sk_buff *skb)
{
	const struct bpf_sock *sk = skb->sk;

	return sk && sk->state != BPF_TCP_CLOSE;
}

/* True: the packet comes in again, as a copy of its descriptor
 * without a socket, and this descriptor ends here. False: it
 * is unchanged, but every pointer taken before is gone.
 */
static __always_inline bool socket_detach(struct __sk_buff *skb)
{
	return !bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
}
