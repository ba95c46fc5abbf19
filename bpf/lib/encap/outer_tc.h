/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Parses the outer header of outer.h, on TC. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_tc.h"
#else
#include "lib/encap/srv6_tc.h"
#endif
