/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Inserts room for the outer header of outer.h. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_push_tc.h"
#else
#include "lib/encap/push_tc.h"
#endif
