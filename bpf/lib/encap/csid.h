/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Compressed SIDs of the NEXT-C-SID flavour (RFC 9800 4.1): block of 48 bits, a
 * C-SID of 16, and an argument of 64, which holds the C-SIDs to come.
 */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_endian.h>
#include "lib/wire/net.h"

#define CSID_BITS 16
#define CSID_MASK 0xffffULL

/* N05 and N06: shifts the argument up behind the block and fills
 * the end with zeros. addr: a destination, in network order.
 */
static __always_inline struct sid csid_shift(const __be64 *addr)
{
	__u64 hi = bpf_be64_to_cpu(addr[0]), lo = bpf_be64_to_cpu(addr[1]);

	hi = (hi & ~CSID_MASK) | lo >> (64 - CSID_BITS);
	return (struct sid){
		.hi = bpf_cpu_to_be64(hi),
		.lo = bpf_cpu_to_be64(lo << CSID_BITS),
	};
}
