/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Ours: -nostdinc leaves the compiler's out. */
#pragma once

#define bool _Bool
#define true 1
#define false 0
