/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* ICMPv6 errors (RFC 4443) as they are on the wire, and which packets get one. */
#pragma once

#include <linux/bpf.h>
#include <linux/types.h>
#include "lib/hook.h"
#include "lib/wire/net.h"

#define ICMP6_UNREACHABLE 1
#define ICMP6_TOO_BIG 2
#define ICMP6_TIME_EXCEEDED 3
#define ICMP6_PARAMETER 4
#define ICMP6_INFORMATIONAL 128 /* from this type on */
#define ICMP6_ROUTER_SOLICITATION 133 /* the first of RFC 4861 */
#define ICMP6_REDIRECT 137 /* the last */

#define ICMP6_NO_ROUTE 0 /* codes of the first (RFC 4443 3.1) */
#define ICMP6_PROHIBITED 1
#define ICMP6_ADDRESS 3 /* the address is unreachable for any other reason */

#define ICMP6_PARAMETER_FIELD 0 /* an erroneous header field */
#define ICMP6_PARAMETER_NEXT 1 /* an unrecognized Next Header type */
#define ICMP6_PARAMETER_OPTION 2 /* an unrecognized option */
#define ICMP6_PARAMETER_UPPER 4 /* SR upper-layer header error, RFC 8986 10.3 */

/* RFC 8200 5: every link carries this. An error is not longer (RFC 4443 2.4 c). */
#define IP6_MIN_MTU 1280

struct icmp6_hdr {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 data; /* MTU or pointer */
};
_Static_assert(sizeof(struct icmp6_hdr) == 8, "ICMPv6 header");

#define ICMP6_QUOTE_MAX                                                        \
	(IP6_MIN_MTU - sizeof(struct ip6_hdr) - sizeof(struct icmp6_hdr))

struct icmp6_message {
	struct ip6_hdr ip6;
	struct icmp6_hdr icmp;
	__u8 quote[ICMP6_QUOTE_MAX];
};
_Static_assert(sizeof(struct icmp6_message) == IP6_MIN_MTU, "a whole message");

/* ICMP (RFC 792), with the MTU of RFC 1191 4. */
#define ICMP4_UNREACHABLE 3
#define ICMP4_SOURCE_QUENCH 4
#define ICMP4_REDIRECT 5
#define ICMP4_TIME_EXCEEDED 11
#define ICMP4_PARAMETER 12
/* Codes of ICMP4_UNREACHABLE; RFC 1812 5.2.7.1 has the last. */
#define ICMP4_HOST 1
#define ICMP4_FRAGMENTATION_NEEDED 4
#define ICMP4_PROHIBITED 13

/* RFC 1812 4.3.2.3 */
#define ICMP4_LEN_MAX 576
/* RFC 791 3.2: every link carries this. */
#define IP4_MIN_MTU 68

#define ICMP4_QUOTE_MAX                                                        \
	(ICMP4_LEN_MAX - sizeof(struct ip4_hdr) - sizeof(struct icmp6_hdr))

struct icmp4_message {
	struct ip4_hdr ip4;
	struct icmp6_hdr icmp; /* the same fields */
	__u8 quote[ICMP4_QUOTE_MAX];
};
_Static_assert(sizeof(struct icmp4_message) == ICMP4_LEN_MAX,
	       "a whole message");

/* Type, code and pointer of an error, in one word; pointer is 0 if there is none. */
#define ICMP6_ERROR(type, code, pointer)                                       \
	((__u32)(type) << 24 | (__u32)(code) << 16 | (pointer))

/* c: at the ICMPv6 header. */
static __always_inline bool icmp6_informs(struct cursor c)
{
	const struct icmp6_hdr *icmp = cursor_take(&c, struct icmp6_hdr);

	return icmp && icmp->type >= ICMP6_INFORMATIONAL;
}

/* RFC 1122 3.2.2: is this an error? No error may answer it. */
static __always_inline bool icmp4_is_error(__u8 type)
{
	return type == ICMP4_UNREACHABLE || type == ICMP4_SOURCE_QUENCH ||
	       type == ICMP4_REDIRECT || type == ICMP4_TIME_EXCEEDED ||
	       type == ICMP4_PARAMETER;
}
