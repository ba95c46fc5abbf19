/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Removes the outer header of outer.h. TC only. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_strip_tc.h"
#else
#include "lib/encap/strip_tc.h"
#endif
