/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
#include "lib/maps.h"

SEC("tc")
int ws_core_tc(struct __sk_buff *ctx)
{
	return ctx->len ? -1 : 2;
}

char _license[] SEC("license") = "Dual BSD/GPL";
const struct ws_event *ws_event_unused __attribute__((unused));
