/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-2-Clause) */
/* Every map of the data path. Programs write ws_stats, ws_refusals, ws_errors,
 * ws_scratch, ws_path_mtus, ws_exits, ws_nexthops, ws_conns, ws_conns_new, ws_conns_added, ws_events,
 * ws_slots and the other maps of functions' headers, ws_bypass_flows, ws_tracing, ws_traced, the contents of
 * ws_windows, the packets left in ws_traces, and the last numbers in ws_numbers; user space writes all else. User space
 * may lower max_entries of the arrays that are marked so, to the size that a node needs.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <waystamp/abi.h>
#include "lib/node/scratch.h"

#define WS_CHAINS_MAX 65536
#define WS_PROXIES_MAX 1024
#define WS_BYPASS_FLOWS 4096

volatile const struct ws_config cfg = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_node);
	__uint(max_entries, 1);
} ws_node SEC(".maps");

/* About 80 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_hop_key);
	__type(value, __u32);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_hop_index SEC(".maps");

/* 192 bytes per entry; lowered by user space. See ws_match_map for the flag. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ws_hop);
	__uint(max_entries, 4 * WS_CHAINS_MAX);
} ws_hops SEC(".maps");

/* 8 bytes per entry; lowered by user space, to twice the SIDs of the locator. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_place);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_places SEC(".maps");

/* Read only for the reason of a refusal; about 80 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_hop_key);
	__type(value, __u32);
	__uint(max_entries, 4 * WS_CHAINS_MAX);
} ws_sids SEC(".maps");

/* About 80 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_source_key);
	__type(value, __u32);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_sources SEC(".maps");

/* About 70 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_egress_key);
	__type(value, __u32);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_egress_index SEC(".maps");

/* 544 bytes per entry; lowered by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_egress);
	__uint(max_entries, 4 * WS_CHAINS_MAX);
} ws_egresses SEC(".maps");

/* The words of proof/replay.h: a megabyte, with one window after
 * the other. All slabs have one size, so that the kernel inlines
 * both look-ups, and user space maps them into its memory.
 */
struct ws_window_slab {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, WS_WINDOW_SLAB);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, WS_WINDOW_SLABS);
	__array(values, struct ws_window_slab);
} ws_windows SEC(".maps");

/* 456 bytes per entry; lowered by user space. An entry is
 * immutable while a rule refers to it, but for its trace.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct ws_headend);
	__uint(max_entries, WS_CHAINS_MAX);
} ws_headends SEC(".maps");

/* The numbers of WS_NUMBER_SLOTS paths and epochs: 4 KB for each CPU, and
 * 4 KB for their owners. This is no per-CPU array, so that user space can
 * raise a ceiling in its own memory while programs change the number
 * beside it. User space sets max_entries to the number of possible CPUs.
 */
struct ws_number_slab {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	/* The compiler keeps no type information of a map in a map. */
	__uint(value_size, sizeof(struct ws_number));
	__uint(max_entries, 2 * WS_NUMBER_SLOTS);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, WS_NUMBER_SLABS);
	__array(values, struct ws_number_slab);
} ws_numbers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, __u32);
	__uint(max_entries, WS_CHAINS_MAX);
} ws_paths SEC(".maps");

/* About 70 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, __u32);
	__uint(max_entries, WS_CHAINS_MAX);
} ws_guards SEC(".maps");

/* 16 bytes per entry; lowered by user space, as ws_stats. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_path_mtu);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_path_mtus SEC(".maps");

/* 24 bytes per entry and CPU; lowered by user space. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_stats);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_stats SEC(".maps");

/* 64 bytes per entry; user space sets max_entries. It can be mapped, which makes
 * entries begin where cache lines do.
 */
struct ws_match_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__uint(value_size, sizeof(struct ws_match_line)); /* see ws_rules_map */
	__uint(max_entries, 256);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, WS_MATCH_TABLES);
	__array(values, struct ws_match_map);
} ws_match SEC(".maps");

/* One entry, of 128 KB. */
struct ws_rules_map {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct ws_ruleset)); /* as ws_number_slab */
	__uint(max_entries, 1);
};

/* A map of maps, so that no packet is matched with a part
 * of the old rules and a part of the new ones.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__type(key, __u32);
	__uint(max_entries, 1);
	__array(values, struct ws_rules_map);
} ws_rules SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct ws_port);
	__uint(max_entries, 4096);
} ws_ports SEC(".maps");

/* 896 bytes per entry and CPU; lowered by user space, as ws_stats. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_exit);
	__uint(max_entries, 2 * WS_CHAINS_MAX);
} ws_exits SEC(".maps");

/* 8 MB. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct ws_nexthop_key);
	__type(value, struct ws_nexthop);
	__uint(max_entries, 65536);
} ws_nexthops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct ws_proxy);
	__uint(max_entries, WS_PROXIES_MAX);
} ws_proxies SEC(".maps");

/* About 80 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, struct ws_stream);
	__uint(max_entries, WS_CHAINS_MAX);
} ws_streams SEC(".maps");

/* About 80 bytes per live entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_service_key);
	__type(value, __u32);
	__uint(max_entries, 4096);
} ws_services SEC(".maps");

/* About 120 bytes per live entry. User space removes closed connections, and connections
 * without an answer of the server for two minutes: a single SYN creates an entry.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct ws_conn_key);
	__type(value, struct ws_conn);
	__uint(max_entries, WS_CONNS_MAX);
} ws_conns SEC(".maps");

/* Entries that programs have added to ws_conns, by function: the index is ws_proxy.stats. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, WS_PROXIES_MAX);
} ws_conns_added SEC(".maps");

/* Those of them that user space has removed. Modulo 2^64, like the others. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, WS_PROXIES_MAX);
} ws_conns_removed SEC(".maps");

/* 1 MB. A flood of SYNs evicts only connections that the function has not continued yet. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct ws_conn_key);
	__type(value, struct ws_conn);
	__uint(max_entries, 8192);
} ws_conns_new SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_proxy_stats);
	__uint(max_entries, WS_PROXIES_MAX);
} ws_proxy_stats SEC(".maps");

/* The index in ws_cache of a fingerprint. 64 bytes per bucket of seven; user space
 * sets max_entries, here and of ws_cache, to the size that the node's functions need.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_bucket);
	__uint(max_entries, 8192);
} ws_buckets SEC(".maps");

/* 472 bytes per entry, live or not. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_cached);
	__uint(max_entries, 8192 * WS_WAYS);
} ws_cache SEC(".maps");

/* About 80 bytes per entry. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__type(value, struct ws_copies);
	__uint(max_entries, 16384);
} ws_copies SEC(".maps");

/* The headers of packets that are recognised by metadata: skb->tc_index is
 * the index, and 0 means none. 472 bytes per entry; lowered by user space.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_cached);
	__uint(max_entries, 65536);
} ws_slots SEC(".maps");

/* For each WS_SLOTS_NEAR indexes of ws_slots, from 1 on:
 * their proxy, and the slots of their headers.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct slot_block)); /* not shared with Go */
	__uint(max_entries, 65536 / WS_SLOTS_NEAR);
} ws_slot_blocks SEC(".maps");

/* Datagrams with fragments in functions that are recognised by
 * metadata; key: struct fragment.datagram. About 200 bytes per entry.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__uint(value_size, sizeof(struct fragments)); /* not shared with Go */
	__uint(max_entries, 4096);
} ws_fragments SEC(".maps");

/* The datagram of the last fragment that got this index. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 16384);
} ws_fragment_of SEC(".maps");

/* Flows of functions with a bypass, 256 KB for each CPU. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct bypass_flow)); /* not shared with Go */
	__uint(max_entries, WS_BYPASS_FLOWS);
} ws_bypass_flows SEC(".maps");

/* The slot from which a CPU searches the next free one. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, WS_PROXIES_MAX);
} ws_slot_next SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_refusal);
	__uint(max_entries, WS_REASON_COUNT);
} ws_refusals SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_errors);
	__uint(max_entries, 1);
} ws_errors SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__uint(value_size, sizeof(struct scratch)); /* not shared with Go */
	__uint(max_entries, 1);
} ws_scratch SEC(".maps");

/* The scratch memory of this CPU. NULL is a bug. */
static __always_inline struct scratch *scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&ws_scratch, &zero);
}

/* The addresses of the nodes with labels; about 80 bytes per entry. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct ws_label);
	__uint(max_entries, WS_CHAINS_MAX);
} ws_labels SEC(".maps");

/* The programs for tail calls on TC; see encap/ext_tc.h and encap/labels_tc.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, WS_PROGRAMS);
} ws_programs SEC(".maps");

/* The programs for tail calls on XDP: a map has programs of one hook. See encap/labels_xdp.h. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__type(key, __u32);
	__type(value, __u32);
	__uint(max_entries, WS_PROGRAMS_XDP);
} ws_programs_xdp SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 512 * 1024);
} ws_events SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_trace);
	__uint(max_entries, WS_TRACES);
} ws_traces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct ws_tracing);
	__uint(max_entries, 1);
} ws_tracing SEC(".maps");

/* Not ws_events: traced packets must not take refusals' room. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 64 * 1024);
} ws_traced SEC(".maps");
