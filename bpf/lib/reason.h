/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The reason of a refusal, and its place in the source. A function that finds
 * an error returns REASON(...); its caller passes it to ws_refuse, so that
 * the event names the line that decided, even if a caller far above refuses.
 */
#pragma once

#include <linux/types.h>
#include <waystamp/places.h>
#include <waystamp/reasons.h>

/* An enum ws_reason in the lowest byte, the line above it, and in the
 * highest byte an enum ws_file; WS_REASON_NONE, which is 0: no error.
 */
typedef __u32 reason_t;

_Static_assert(WS_REASON_COUNT <= 256, "reasons fit a byte");
_Static_assert(WS_FILE_COUNT <= 128,
	       "files fit a byte, and no reason is negative");

#define WS_FILE_IF(name, folder, file)                                         \
	!__builtin_strcmp(__FILE_NAME__, file) ? WS_FILE_##name:
/* The file that is compiled; the compiler compares the strings. */
#define WS_FILE (WS_FILES(WS_FILE_IF) WS_FILE_NONE)

#define REASON(name)                                                           \
	((reason_t)(WS_REASON_##name | __LINE__ << 8 | WS_FILE << 24))

static __always_inline __u32 reason_of(reason_t why)
{
	return why & 0xff;
}

static __always_inline __u32 reason_line(reason_t why)
{
	return why >> 8 & 0xffff;
}

static __always_inline __u32 reason_file(reason_t why)
{
	return why >> 24;
}
