/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* The outer header that this program is compiled for: SRv6 or labels. Both hooks. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls.h"
#else
#include "lib/encap/srv6.h"
#endif
