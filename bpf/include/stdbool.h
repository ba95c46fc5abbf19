/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Our own: with -nostdinc the compiler's header is not found. */
#pragma once

#define bool _Bool
#define true 1
#define false 0
