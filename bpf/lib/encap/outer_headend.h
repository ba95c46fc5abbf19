/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* A headend's outer header, of the kind of outer.h. Both hooks. */
#pragma once

#ifdef WS_MPLS
#include "lib/encap/mpls_headend.h"
#else
#include "lib/encap/srv6_headend.h"
#endif
