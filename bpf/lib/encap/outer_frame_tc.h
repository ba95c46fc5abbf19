/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer header of outer.h in a packet that is not parsed yet. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_frame_tc.h"
#else
#include "lib/encap/srv6_frame_tc.h"
#endif
