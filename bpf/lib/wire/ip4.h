/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* An IPv4 header's checksum: verified once, when a packet enters, and then
 * only updated by the changes (RFC 1624), so that a wrong one stays wrong.
 */
#pragma once

#include "lib/wire/cursor.h"
#include "lib/wire/net.h"

#define IP4_OPTIONS_WORDS 10 /* RFC 791 3.1: a header has 15 words at most */

static __always_inline __u32 ip4_fold(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* The sum of the header's words without options, in the order of the wire. */
static __always_inline __u64 ip4_sum(const struct ip4_hdr *ip4)
{
	const __u32 *word = (const void *)ip4;

	return (__u64)word[0] + word[1] + word[2] + word[3] + word[4];
}

/* Is the checksum right? c: behind ip4, at its options. */
static __always_inline bool ip4_sum_is_right(const struct ip4_hdr *ip4,
					     struct cursor c)
{
	__u32 options = ip4_header_len(ip4) / 4 - 5;
	__u64 sum = ip4_sum(ip4);

	for (__u32 i = 0; i < IP4_OPTIONS_WORDS; i++) {
		const __u32 *word;

		if (i >= options)
			break;
		word = cursor_take(&c, __u32);
		if (!word)
			return false;
		sum += *word;
	}
	return ip4_fold(sum) == 0xffff;
}

/* Updates the checksum for a changed word (RFC 1624 3, equation 3). */
static __always_inline void ip4_sum_update(struct ip4_hdr *ip4, __u16 before,
					   __u16 now)
{
	__u32 sum = (__u16)~ip4->checksum + (__u16)~before + now;

	sum = (sum & 0xffff) + (sum >> 16);
	ip4->checksum = ~(sum + (sum >> 16));
}

static __always_inline void ip4_decrement(struct ip4_hdr *ip4)
{
	__u16 *word = (__u16 *)&ip4->ttl, before = *word;

	ip4->ttl--;
	ip4_sum_update(ip4, before, *word);
}

static __always_inline void ip4_set_tos(struct ip4_hdr *ip4, __u8 tos)
{
	__u16 *word = (__u16 *)ip4, before = *word;

	ip4->tos = tos;
	ip4_sum_update(ip4, before, *word);
}
