/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Empty on purpose: bpf_endian.h asks for it and uses compiler built-ins. */
#pragma once
