/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The ICMP errors for the outer header of outer.h. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_error.h"
#else
#include "lib/encap/srv6_error.h"
#endif
