/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The route to the next visit, by the outer header of outer.h. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_way_tc.h"
#else
#include "lib/encap/srv6_way_tc.h"
#endif
