/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A read position inside a packet that cannot leave the packet. */
#pragma once

#include <linux/types.h>
#include <bpf/bpf_helpers.h>

struct cursor {
	void *pos;
	void *end;
};

/* The next len bytes, or NULL where the packet ends before; len is small. */
static __always_inline void *cursor_take_bytes(struct cursor *c,
					       const __u32 len)
{
	void *p = c->pos;

	if (p + len > c->end)
		return NULL;
	c->pos = p + len;
	return p;
}

#define cursor_take(c, type) ((type *)cursor_take_bytes((c), sizeof(type)))
