/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* That kind, as it was kept while its packet was in a function. Both hooks. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_kept.h"
#else
#include "lib/encap/srv6_kept.h"
#endif
