/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* That kind in a packet of which nothing else is known. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_frame_tc.h"
#else
#include "lib/encap/srv6_frame_tc.h"
#endif
