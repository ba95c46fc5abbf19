/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The way to the next visit for that kind. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_way_tc.h"
#else
#include "lib/encap/srv6_way_tc.h"
#endif
