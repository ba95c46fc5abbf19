/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#include "lib/maps.h"

SEC("xdp")
int ws_core_xdp(struct xdp_md *ctx)
{
	return ctx->data ? 2 : 1;
}

char _license[] SEC("license") = "Dual BSD/GPL";
