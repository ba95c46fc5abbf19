/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* What a socket of this machine sent, over veth from a container, belongs to that
 * socket until somebody's IP stack takes it, which on our way is the receiver's.
 * The kernel does not count the room that it adds to the head of such a packet,
 * and a TCP receiver stumbles over every one: a WARN that is printed once, yet
 * traps each time. TC only.
 */
#pragma once

#include "lib/hook.h"

/* A TCP connection: the one sort of socket whose receiver counts so strictly. */
static __always_inline bool socket_is_tcp(const struct __sk_buff *skb)
{
	const struct bpf_sock *sk = skb->sk;

	return sk && sk->state != BPF_TCP_CLOSE;
}

/* True: the packet comes in once more, as a copy of its descriptor that nobody
 * owns, and this one ends here. False: it is what it was, but every pointer taken
 * before is gone.
 */
static __always_inline bool socket_detach(struct __sk_buff *skb)
{
	return !bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
}
