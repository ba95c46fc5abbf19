/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parses the outer header of outer.h, on XDP. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_xdp.h"
#else
#include "lib/encap/srv6_xdp.h"
#endif
