/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer header of outer.h, kept while its packet is in a function. Both hooks. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_kept.h"
#else
#include "lib/encap/srv6_kept.h"
#endif
