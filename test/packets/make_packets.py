#!/usr/bin/env python3
"""Makes the test packets of this directory, with Scapy and nothing of waystamp.

    apt-get install python3-scapy
    /usr/bin/python3 make_packets.py        # writes world.json and *.txt here

The proofs are computed here a third time, beside the Go model and the programs
in bpf/, from docs/protocol and the reference code of SipHash, so that three
writers must agree. Scapy builds every header; TLVs are raw bytes, because
Scapy's SRH TLVs are not RFC 8754's. The output depends on nothing but this
file: a second run changes nothing.

The world: a headend r1, nodes r2, r3 and ra with functions, an egress r6, and
some paths between them. world.json says it to Go. In a packet file a block is one
packet:

    name:   unique over all files
    note:   what is special about it
    node:   where it arrives; "unarmed" behind the name: programs, but no plan
    port:   core, edge, or edge-drop (unmatched: drop)
    counter: (edge) the number that the headend gives it, on CPU 0
    frames: (edge) frames in the super-packet, if not 1
    expect: pass, forward, deliver, or drop REASON
    report: reasons that are reported while the packet goes on
    frame:  the bytes, from the Ethernet header
    error:  for drop, in errors.txt: the ICMP error that its source is told by,
            from the IPv6 header
    out:    for forward: what is sent, from the IPv6 header; a headend's flow
            label is zero here, and anything but zero on the wire
"""
import hashlib
import ipaddress
import json
import os
import struct

from scapy.layers.inet import TCP, UDP, ICMP, IP, IPOption, IPOption_NOP
from scapy.layers.inet6 import (IPv6, ICMPv6DestUnreach, ICMPv6EchoRequest,
                                ICMPv6ND_NS, ICMPv6ND_Redirect,
                                ICMPv6PacketTooBig, ICMPv6ParamProblem,
                                ICMPv6TimeExceeded, HBHOptUnknown, Pad1, PadN,
                                IPv6ExtHdrSegmentRouting,
                                IPv6ExtHdrDestOpt, IPv6ExtHdrFragment,
                                IPv6ExtHdrHopByHop,
                                IPv6ExtHdrRouting)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

HERE = os.path.dirname(os.path.abspath(__file__))
M64 = (1 << 64) - 1

# --- SipHash-2-4 and the two kinds of proof, from their papers ---------------


def rotl(x, b):
    return ((x << b) | (x >> (64 - b))) & M64


def siphash24(key, msg):
    """The 8 bytes of the reference code."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d,
         k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573]

    def rounds(n):
        for _ in range(n):
            v[0] = (v[0] + v[1]) & M64
            v[1] = rotl(v[1], 13) ^ v[0]
            v[0] = rotl(v[0], 32)
            v[2] = (v[2] + v[3]) & M64
            v[3] = rotl(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & M64
            v[3] = rotl(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & M64
            v[1] = rotl(v[1], 17) ^ v[2]
            v[2] = rotl(v[2], 32)

    tail = msg[len(msg) - len(msg) % 8:]
    last = tail + bytes(7 - len(tail)) + bytes([len(msg) & 0xff])
    for i in range(0, len(msg) - len(tail), 8):
        m = struct.unpack("<Q", msg[i:i + 8])[0]
        v[3] ^= m
        rounds(2)
        v[0] ^= m
    m = struct.unpack("<Q", last)[0]
    v[3] ^= m
    rounds(2)
    v[0] ^= m
    v[2] ^= 0xff
    rounds(4)
    return struct.pack("<Q", v[0] ^ v[1] ^ v[2] ^ v[3])


# The vector of the SipHash paper, appendix A.
assert siphash24(bytes(range(16)), bytes(range(15))) == bytes.fromhex(
    "e545be4961ca29a1")

POT, OPOT, KEYED, KEYED_FLOW = 0, 1, 2, 3
PRIME = (1 << 61) - 1


def secret(*what):
    return hashlib.sha256("/".join(map(str, what)).encode()).digest()


def number(*what):
    return int.from_bytes(secret(*what)[:8], "big")


def container(sids):
    """SIDs of the block fc00::/48 in one address."""
    csids = ["%x" % int(s.split(":")[3], 16) for s in sids]
    return "fc00:0:0:" + ":".join(csids) + ("::" if len(csids) < 5 else "")


NETFILTER = "nf"  # the function of kind netfilter, in its node's own kernel


def with_argument(s, argument):
    """The SID with this in its lower 64 bits (RFC 8986 3.1)."""
    return str(ipaddress.IPv6Address(int(ipaddress.IPv6Address(s)) + argument))


class Path:
    """One direction of one chain with the secrets of all its positions."""

    def __init__(self, chain, path, epoch, scheme, visits, destination,
                 source="::/0", on_violation="drop", mtu=0, sids="plain",
                 reduced=False, mss=0, rule=None, argument=0, guard=None):
        self.chain, self.path, self.epoch = chain, path, epoch
        self.scheme, self.on_violation = scheme, on_violation
        self.guard = guard  # of its egress
        self.destination, self.source = destination, source
        self.rule = rule  # what is asked for beside the prefixes
        self.mtu = mtu  # of inner packets; 0: not known
        self.mss = mss  # the most that SYNs may say; 0: they are left alone
        self.visits = visits  # (node, function, SID), the headend first
        self.argument = argument  # of its visit of NETFILTER; 0: none
        self.sids, self.reduced = sids, reduced
        k = len(visits)
        tag = (chain, epoch)
        self.keys = [secret("key", *tag, j)[:16] for j in range(k - 1)]
        self.bind = secret("bind", *tag)[:16]
        self.flow = b""  # keyed-flow: what stamps are bound to
        if scheme in (KEYED, KEYED_FLOW):
            return
        p = PRIME
        xs = [number("x", *tag, j) % p for j in range(k)]
        f1 = [number("f1", *tag, j) % p for j in range(k)]
        f2 = [0] + [number("f2", *tag, j) % p for j in range(1, k)]
        self.s = f1[0]

        def at(f, x):
            return sum(c * pow(x, i, p) for i, c in enumerate(f)) % p

        self.share = [at(f1, x) for x in xs]
        self.public = [at(f2, x) for x in xs]
        self.lpc = []
        for j in range(k):
            lpc = 1
            for i in range(k):
                if i != j:
                    lpc = lpc * xs[i] * pow(xs[i] - xs[j], -1, p) % p
            self.lpc.append(lpc)
        self.mask = [(0, 0)] * (k - 1)  # of the link behind position j
        if scheme == OPOT:
            self.mask = [(number("rnd mask", *tag, j),
                          number("cml mask", *tag, j)) for j in range(k - 1)]

    def sid(self, position):
        return self.visits[position][2]

    def whole(self):
        """The segment list: SIDs, or containers of up to five C-SIDs of 16
        bits behind the block of 48 (RFC 9800 4.1)."""
        sids = [v[2] for v in self.visits[1:]]
        if self.sids == "plain":
            return [self.with_argument(j) for j in range(1, len(self.visits))]
        return [container(sids[i:i + 5]) for i in range(0, len(sids), 5)]

    def with_argument(self, position):
        """The SID there, with the argument in its lowest 32 bits."""
        _, function, s = self.visits[position]
        if function != NETFILTER or not self.argument:
            return s
        return with_argument(s, self.argument)

    def segments(self):
        """The list as carried: a reduced one (RFC 8986 5.2) lacks its first
        entry, unless that is all."""
        whole = self.whole()
        return whole[1:] if self.reduced and len(whole) > 1 else whole

    def at(self, position):
        """The destination of a packet that comes to position."""
        sids = [v[2] for v in self.visits[1:]]
        if self.sids == "plain":
            return self.with_argument(position)
        last = min(len(sids), (position - 1) // 5 * 5 + 5)
        return container(sids[position - 1:last])

    def left(self, position):
        """Segments Left there."""
        if self.sids == "plain":
            return len(self.visits) - 1 - position
        return len(self.whole()) - 1 - (position - 1) // 5

    def up(self, j):
        return self.mask[j - 1] if j > 0 else (0, 0)

    def down(self, j):
        return self.mask[j] if j < len(self.mask) else (0, 0)

    def stamp(self, j, rnd, cml):
        """What position j makes of the values on the wire."""
        if self.scheme == KEYED:
            m = struct.pack(">QQBBIB", rnd, cml, self.scheme, self.epoch,
                            self.path, j)
            assert len(m) == 23
            return rnd, struct.unpack(">Q", siphash24(self.keys[j], m))[0]
        if self.scheme == KEYED_FLOW:
            m = struct.pack(">QQ8sBBIB", rnd, cml, siphash24(
                self.bind, self.flow), self.scheme, self.epoch, self.path, j)
            assert len(m) == 31
            return rnd, struct.unpack(">Q", siphash24(self.keys[j], m))[0]
        rnd, cml = rnd ^ self.up(j)[0], cml ^ self.up(j)[1]
        cml = (cml + (self.share[j] + self.public[j] + rnd) * self.lpc[j]) \
            % PRIME
        return rnd ^ self.down(j)[0], cml ^ self.down(j)[1]

    def values(self, before, rnd):
        """RND and CML on the wire, as they reach position before."""
        return self.values_of(range(before), rnd)

    def values_of(self, order, rnd):
        """The same after the positions of order, and only they, stamped."""
        cml = 0
        for j in order:
            rnd, cml = self.stamp(j, rnd, cml)
        return rnd, cml

    def verifies(self, rnd, cml):
        k = len(self.visits)
        if self.scheme in (KEYED, KEYED_FLOW):
            return self.values(k - 1, rnd) == (rnd, cml)
        r, c = self.stamp(k - 1, rnd, cml)
        return c == (r + self.s) % PRIME

    def tlv(self, values, path=None, epoch=None, scheme=None):
        return struct.pack(">BBBBIQQ", 252, 22,
                           self.scheme if scheme is None else scheme,
                           self.epoch if epoch is None else epoch,
                           self.path if path is None else path, *values)

    def world(self):
        w = {"chain": self.chain, "path": self.path, "epoch": self.epoch,
             "scheme": ["pot", "opot", "keyed", "keyed-flow"][self.scheme],
             "on_violation": self.on_violation,
             "destination": self.destination, "source": self.source,
             "mtu": self.mtu, "mss": self.mss, "sids": self.sids, "reduced": self.reduced,
             "hops": [{"node": n, "function": f, "sid": s}
                      for n, f, s in self.visits]}
        for h in w["hops"]:
            if h["function"] == NETFILTER:
                h["netfilter"], h["argument"] = True, self.argument
        if self.rule:
            w["rule"] = self.rule
        if self.guard:
            w["guard"] = self.guard
        if self.scheme in (KEYED, KEYED_FLOW):
            w["keys"] = [k.hex() for k in self.keys]
            if self.scheme == KEYED_FLOW:
                w["bind"] = self.bind.hex()
            return w
        h = "0x%x"
        w["prime"], w["secret"] = h % PRIME, h % self.s
        w["polynomials"] = [
            {"share": h % self.share[j], "public": h % self.public[j],
             "lpc": h % self.lpc[j],
             "up": [h % x for x in self.up(j)],
             "down": [h % x for x in self.down(j)]}
            for j in range(len(self.visits))]
        return w


# --- the world ----------------------------------------------------------------

NODES = [
    {"name": "r1", "address": "fc00:1::1", "locator": "fc00:0:0:100::/56"},
    {"name": "r2", "address": "fc00:1::2", "locator": "fc00:0:0:200::/56"},
    {"name": "r3", "address": "fc00:1::3", "locator": "fc00:0:0:300::/56"},
    {"name": "r6", "address": "fc00:1::6", "locator": "fc00:0:0:600::/56"},
    # Headend and egress of the chains by rules.
    {"name": "r4", "address": "fc00:1::4", "locator": "fc00:0:0:400::/56"},
    {"name": "r5", "address": "fc00:1::5", "locator": "fc00:0:0:500::/56"},
    # Has the function of kind netfilter.
    {"name": "ra", "address": "fc00:1::a", "locator": "fc00:0:0:a00::/56"},
]
# Own addresses beside the node's.
LOCAL = {"r1": ["fc00:7::1", "192.0.2.254"],
         "r6": ["fc00:8::1", "198.51.100.1"]}
# Routes that refuse, by kind. No node is where those of r1 and r2 lead.
SIDS_REFUSED = [("fc00:0:0:700::/56", "unreachable"),
                ("fc00:0:0:800::/56", "prohibit"),
                ("fc00:0:0:900::/56", "blackhole")]
ROUTES = {"r1": SIDS_REFUSED, "r2": SIDS_REFUSED,
          "r6": [("fc00:8:0:0:d1::/80", "unreachable"),
                 ("fc00:8:0:0:d2::/80", "prohibit"),
                 ("fc00:8:0:0:d3::/80", "blackhole"),
                 ("198.51.100.64/28", "unreachable"),
                 ("198.51.100.80/28", "prohibit"),
                 ("198.51.100.96/28", "blackhole")]}
H1, H2 = "fc00:7::2", "fc00:8::2"
V1, V2 = "192.0.2.2", "198.51.100.2"


def sid(n):
    return "fc00:0:0:%x::" % n


def through(*visits):
    return [("r1", "", "")] + [("r%x" % (s >> 8), f, sid(s))
                               for f, s in visits]


web = Path("web", 0x5eed0001, 1, KEYED,
           through(("fw", 0x201), ("dpi", 0x301), ("", 0x601)), "fc00:8::/64")
web2 = Path("web", 0x5eed0001, 2, KEYED, web.visits, web.destination)
ordered = Path("ordered", 0x5eed0002, 3, OPOT,
               through(("fw", 0x202), ("dpi", 0x302), ("", 0x602)),
               "fc00:9::/64")
unordered = Path("unordered", 0x5eed0003, 255, POT,
                 through(("fw", 0x203), ("dpi", 0x303), ("", 0x603)),
                 "fc00:a::/64")
direct = Path("direct", 0x5eed0004, 0, KEYED, through(("", 0x604)),
              "fc00:b::/64", mtu=1300)
# 16 segments: odd positions at r2, even ones at r3.
longest = Path("longest", 0x5eed0005, 1, KEYED,
               through(*[("fw", 0x210 + j) if j % 2 else ("dpi", 0x310 + j)
                         for j in range(1, 16)], ("", 0x605)), "fc00:c::/64")
# Two functions on r2, then r2 is the egress too.
local = Path("local", 0x5eed0006, 1, KEYED,
             through(("fw", 0x206), ("cache", 0x207), ("", 0x208)),
             "fc00:d::/64")
# Two functions on r2, then on.
twice = Path("twice", 0x5eed0007, 1, OPOT,
             through(("fw", 0x209), ("cache", 0x20a), ("", 0x607)),
             "fc00:e::/64")
report = Path("report", 0x5eed0008, 1, OPOT,
              through(("fw", 0x20b), ("", 0x608)), "fc00:f::/64",
              on_violation="report")
# The same destination as web; only from this source.
special = Path("special", 0x5eed0009, 1, KEYED,
               through(("dpi", 0x309), ("", 0x609)), "fc00:8::/64",
               source="fc00:7:0:0:5::/80")
bound = Path("bound", 0x5eed000a, 1, KEYED_FLOW,
             through(("fw", 0x20c), ("dpi", 0x30c), ("", 0x60c)),
             "fc00:10::/64")
# IPv4: one by destination, one by source.
four = Path("four", 0x5eed000b, 1, KEYED,
            through(("fw", 0x20d), ("", 0x60d)), "198.51.100.0/24",
            source="0.0.0.0/0")
fourth = Path("fourth", 0x5eed000c, 1, OPOT, through(("", 0x60e)),
              "0.0.0.0/0", source="203.0.113.0/25", mtu=1300)
# Seven C-SIDs are two containers.
seven = [("fw", 0x220), ("dpi", 0x320), ("fw", 0x221), ("dpi", 0x321),
         ("fw", 0x222), ("dpi", 0x322), ("", 0x620)]
small = Path("small", 0x5eed0010, 1, KEYED,
             through(("fw", 0x223), ("dpi", 0x323), ("", 0x621)),
             "fc00:20::/64", sids="compressed")
squeezed = Path("squeezed", 0x5eed0011, 1, KEYED, through(*seven),
                "fc00:21::/64", sids="compressed")
lean = Path("lean", 0x5eed0012, 1, OPOT,
            through(*[(f, s + 0x10) for f, s in seven]), "fc00:22::/64",
            sids="compressed", reduced=True)
slim = Path("slim", 0x5eed0013, 1, KEYED,
            through(("fw", 0x224), ("dpi", 0x324), ("", 0x622)),
            "fc00:23::/64", reduced=True)
# Six functions on r2, of which the first five are one container.
nearby = Path("nearby", 0x5eed0014, 1, KEYED,
              through(*[("fw", 0x240 + j) for j in range(6)], ("", 0x623)),
              "fc00:24::/64", sids="compressed", reduced=True)
# A container of one C-SID, and a list of one entry: reduced to nothing less.
tiny = Path("tiny", 0x5eed0015, 1, OPOT, through(("fw", 0x225), ("", 0x624)),
            "fc00:25::/64", sids="compressed", reduced=True)
# To nodes that are not there: the first segment, the second, and the second
# behind one on the headend itself.
gone7, gone8, gone9 = (
    Path("gone%d" % n, 0x5eed0020 + n, 1, KEYED, through(
        ("fw", 0x100 * n + 1), ("", 0x640 + n)), "fc00:3%d::/64" % n)
    for n in (7, 8, 9))
half7, half8, half9 = (
    Path("half%d" % n, 0x5eed0030 + n, 1, OPOT, through(
        ("fw", 0x250 + n), ("dpi", 0x100 * n + 2), ("", 0x650 + n)),
        "fc00:4%d::/64" % n) for n in (7, 8, 9))
near7 = Path("near7", 0x5eed0047, 1, KEYED, through(
    ("fw", 0x107), ("dpi", 0x703), ("", 0x667)), "fc00:57::/64")
gone4 = Path("gone4", 0x5eed0048, 1, KEYED, through(
    ("fw", 0x704), ("", 0x668)), "203.0.113.128/28", source="0.0.0.0/0")
near4 = Path("near4", 0x5eed0049, 1, KEYED, through(
    ("fw", 0x108), ("dpi", 0x705), ("", 0x669)), "203.0.113.144/28",
    source="0.0.0.0/0")
# Those lower what SYNs say.
clamped = Path("clamped", 0x5eed0016, 1, KEYED,
               through(("fw", 0x226), ("", 0x626)), "fc00:26::/64", mss=1360)
clamped4 = Path("clamped4", 0x5eed0017, 1, KEYED_FLOW,
                through(("fw", 0x227), ("", 0x627)), "198.51.102.0/24",
                source="0.0.0.0/0", mss=1380)

# Through netfilter: with one argument and another, without one, with the largest
# one and IPv4, in a list that has no room for it, and behind End on the same node.
guest = Path("guest", 0x5eed0050, 1, KEYED, through(
    (NETFILTER, 0xa01), ("", 0x651)), "fc00:50::/64", argument=7)
staff = Path("staff", 0x5eed0051, 1, OPOT, through(
    ("fw", 0x231), (NETFILTER, 0xa02), ("", 0x652)), "fc00:51::/64", argument=8)
unargued = Path("unargued", 0x5eed0052, 1, KEYED_FLOW, through(
    (NETFILTER, 0xa03), ("", 0x653)), "fc00:52::/64")
guest4 = Path("guest4", 0x5eed0053, 1, KEYED, through(
    (NETFILTER, 0xa04), ("", 0x654)), "203.0.113.192/28", source="0.0.0.0/0",
    argument=0xffffffff)
argued_csids = Path("argued-csids", 0x5eed0054, 1, KEYED, through(
    ("fw", 0x232), (NETFILTER, 0xa05), ("", 0x655)), "fc00:54::/64",
    sids="compressed", argument=9)
behind_end = Path("behind-end", 0x5eed0055, 1, KEYED, through(
    ("cache", 0xa06), (NETFILTER, 0xa07), ("", 0x656)), "fc00:55::/64",
    argument=7)


# What their guards do with packets without a proof.
audited, audited4, unguarded, enforced = (
    Path("guard-%s" % name, 0x5eed0080 + n, 1, KEYED,
         through(("fw", 0x260 + n), ("", 0x660 + n)), to,
         source="0.0.0.0/0" if "." in to else "::/0", guard=guard)
    for n, (name, to, guard) in enumerate((
        ("audit", "fc00:70::/64", "audit"),
        ("audit4", "198.51.103.0/24", "audit"),
        ("off", "fc00:71::/64", "off"),
        ("enforce", "fc00:72::/64", "enforce"))))


def by_rule(n, destination="fc00:60::/64", source="::/0", guard=None, **rule):
    """A chain from r4 to r5, of which priority n comes n-th."""
    return Path("rule%d" % n, 0x5eed0060 + n, 1, KEYED if n % 2 else OPOT,
                [("r4", "", ""), ("r5", "", sid(0x500 + n))], destination,
                source, rule={"priority": n, **rule}, guard=guard)


def ports(first, last):
    return {"first": first, "last": last}


by_dport = by_rule(1, protocol=6, destination_port=ports(443, 449))
by_sport = by_rule(2, protocol=17, source_port=ports(5000, 5009))
by_dscp = by_rule(3, dscp=46)
by_protocol = by_rule(4, protocol=58)
by_both = by_rule(5, protocol=6, source_port=ports(1, 1023),
                  destination_port=ports(65535, 65535))
by_source = by_rule(6, source="fc00:7:0:0:5::/80", protocol=17)
by_mark = by_rule(7, destination="fc00:61::/64", mark=0x10, mask=0xf0)
to4 = {"destination": "10.60.0.0/16", "source": "0.0.0.0/0"}
by_dport4 = by_rule(8, protocol=6, destination_port=ports(80, 80), **to4)
by_protocol4 = by_rule(9, protocol=1, **to4)
by_dscp4 = by_rule(10, dscp=10, **to4)
by_source4 = by_rule(11, destination="10.60.0.0/16", source="10.7.5.0/24",
                     protocol=17, destination_port=ports(53, 53))
by_zero = by_rule(12, dscp=0, source="fc00:7:0:0:6::/80")
# Guards of rules for the same addresses.
audit_dns, enforce_rtp = (
    by_rule(n, "fc00:62::/64", protocol=17, destination_port=p, guard=guard)
    for n, p, guard in ((13, ports(53, 53), "audit"),
                        (14, ports(5004, 5004), None)))
audit_web, audit_all = (
    by_rule(n, "fc00:63::/64", guard="audit", **rule)
    for n, rule in ((15, dict(protocol=6, destination_port=ports(80, 80))),
                    (16, dict(dscp=46))))
RULES = [by_dport, by_sport, by_dscp, by_protocol, by_both, by_source, by_mark,
         by_dport4, by_protocol4, by_dscp4, by_source4, by_zero, audit_dns,
         enforce_rtp, audit_web, audit_all]
PATHS = [web, web2, ordered, unordered, direct, longest, local, twice, report,
         special, bound, four, fourth, small, squeezed, lean, slim,
         nearby, tiny, gone7, gone8, gone9, half7, half8, half9, near7, gone4,
         near4, clamped, clamped4, guest, staff, unargued, guest4,
         argued_csids, behind_end, audited, audited4, unguarded,
         enforced] + RULES
LANE, LANES = 5, 4  # of r1, on every path


def rnd(counter, frames=1, lane=LANE):
    return lane << 48 | (frames - 1) << 42 | counter


# --- packets ------------------------------------------------------------------

ETHER = dict(dst="02:00:00:00:00:02", src="02:00:00:00:00:01")


def ether(payload, **kw):
    return bytes(Ether(**{**ETHER, "type": 0x86dd, **kw}) / payload)


def inner(dst=H2, src=H1, hlim=63, tc=0, fl=0x12345, what=None):
    return bytes(IPv6(src=src, dst=dst, hlim=hlim, tc=tc, fl=fl) / (
        what or UDP(sport=4242, dport=53) / Raw(b"waystamp")))


def inner4(dst=V2, src=V1, ttl=63, tos=0, what=None, **kw):
    return bytes(IP(src=src, dst=dst, ttl=ttl, tos=tos, id=0x4242, **kw) / (
        what or UDP(sport=4242, dport=53) / Raw(b"waystamp")))


def summed(packet):
    """packet with the checksum that its IPv4 header needs, by Scapy."""
    p = IP(packet)
    del p.chksum
    return bytes(p)


def decremented4(packet):
    return summed(packet[:8] + bytes([packet[8] - 1]) + packet[9:])


def host(path):
    return path.destination.replace("/64", "2")


def srh(segments, sl, tlvs, nh=41, last_entry=None, hdrlen=None, typ=4,
        tag=0, flags=0):
    """segments: in the order of the visit."""
    n = 16 * len(segments) + len(tlvs)
    assert n % 8 == 0 or hdrlen is not None
    return bytes(IPv6ExtHdrSegmentRouting(
        nh=nh, len=n // 8 if hdrlen is None else hdrlen, type=typ, segleft=sl,
        lastentry=len(segments) - 1 if last_entry is None else last_entry,
        unused1=flags >> 7, protected=flags >> 6 & 1, oam=flags >> 5 & 1,
        alert=flags >> 4 & 1, hmac=flags >> 3 & 1, unused2=flags & 7,
        tag=tag, addresses=segments[::-1])) + tlvs


def outer(dst, payload, hlim=64, tc=0, fl=0xabcde, src="fc00:1::1", nh=43):
    return bytes(IPv6(src=src, dst=dst, hlim=hlim, tc=tc, fl=fl, nh=nh) /
                 Raw(payload))


def carried(path, position, values=None, carries=None, tlvs=None, dst=None,
            hlim=63, tc=0, fl=0xabcde, src="fc00:1::1", behind=None, **kw):
    """A packet on path as it reaches position, but for what is given."""
    segs = path.segments()
    if values is None:
        values = path.values(position, rnd(7))
    if tlvs is None:
        tlvs = path.tlv(values)
    kw.setdefault("segments", segs)
    kw.setdefault("sl", path.left(position))
    if behind is None:
        behind = carries or inner(dst=host(path))
    return outer(dst or path.at(position), srh(tlvs=tlvs, **kw) + behind,
                 hlim=hlim, tc=tc, fl=fl, src=src)


HOP, DEST = 0, 60


def option(kind, n=4):
    return HBHOptUnknown(otype=kind, optlen=n, optdata=bytes(range(n)))


def hopopt(*options):
    return HOP, IPv6ExtHdrHopByHop(options=list(options))


def destopt(*options):
    return DEST, IPv6ExtHdrDestOpt(options=list(options))


def options_before(packet, *headers, behind=43):
    """packet with extension headers between its IPv6 header and the SRH."""
    before = b""
    for kind, header in reversed(headers):
        if not isinstance(header, bytes):
            header.nh = behind
            header = bytes(header)
        else:
            header = bytes([behind]) + header[1:]
        before, behind = header + before, kind
    length = struct.unpack(">H", packet[4:6])[0] + len(before)
    return (packet[:4] + struct.pack(">H", length) + bytes([behind]) +
            packet[7:40] + before + packet[40:])


def flow(src, dst, protocol, sport=0, dport=0):
    """What keyed-flow binds to, as docs/protocol has it."""
    def address(a):
        a = ipaddress.ip_address(a)
        return a.packed if a.version == 6 else bytes(10) + b"\xff\xff" + a.packed
    return address(src) + address(dst) + struct.pack(
        ">BHH", protocol, sport, dport)


def cut(packet, n):
    """Its first n bytes, with a payload length that says so."""
    return packet[:4] + struct.pack(">H", n - 40) + packet[6:n]


def decremented(packet):
    return packet[:7] + bytes([packet[7] - 1]) + packet[8:]


class File:
    def __init__(self, name, theme):
        self.name, self.theme, self.blocks = name, theme, []

    def add(self, name, packet, note, node="r2", port="core",
            expect="forward", report=None, out=None, frame=None, counter=None,
            frames=None, error=None, **kw):
        b = ["name: " + name, "note: " + note, "node: " + node,
             "port: " + port]
        if counter is not None:
            b.append("counter: %d" % counter)
        if frames is not None:
            b.append("frames: %d" % frames)
        b.append("expect: " + expect)
        if report:
            b.append("report: " + report)
        b.append(lines("frame", frame or ether(packet, **kw)))
        assert (expect == "forward") == (out is not None), name
        if out is not None:
            b.append(lines("out", out))
        if error is not None:
            b.append(lines("error", error))
        self.blocks.append("\n".join(b))

    def drop(self, name, reason, packet, note, **kw):
        self.add(name, packet, note, expect="drop " + reason, **kw)

    def write(self, folder="", by="make_packets.py"):
        with open(os.path.join(HERE, folder, self.name + ".txt"), "w") as f:
            f.write("# %s\n# Made by %s; do not edit.\n\n" %
                    (self.theme, by))
            f.write("\n\n".join(self.blocks) + "\n")


def lines(key, b):
    h, w = b.hex(), 96
    return "\n".join(["%s:" % key] + ["  " + h[i:i + w]
                                      for i in range(0, len(h), w)])


def hop(f, name, path, position, note, node=None, **kw):
    """A good packet through one position, with what it becomes there."""
    node = node or path.visits[position][0]
    here = carried(path, position, hlim=63, **kw)
    if position == len(path.visits) - 1:
        out = decremented(kw.get("carries") or inner(dst=host(path)))
    else:
        out = carried(path, position + 1, hlim=62, **kw)
    f.add(name, here, note, node=node, out=out)


def good():
    f = File("good", "Packets that are as they should be, at every position.")
    for path in (web, ordered, unordered):
        for position in (1, 2, 3):
            hop(f, "%s-%d" % (path.chain, position), path, position,
                "%s, position %d of 3" % (path.world()["scheme"], position))
    hop(f, "web-epoch2-1", web2, 1, "another epoch of the same path")
    hop(f, "web-epoch2-3", web2, 3, "another epoch of the same path")
    hop(f, "direct-1", direct, 1, "one segment")
    hop(f, "report-1", report, 1, "two segments")
    hop(f, "report-2", report, 2, "two segments")
    for position in (1, 2, 15, 16):
        hop(f, "longest-%d" % position, longest, position, "16 segments")
    hop(f, "special-2", special, 2, "a chain that takes only one source",
        carries=inner(src="fc00:7::5:0:0:2"))
    f.add("twice", carried(twice, 1), "two functions on one node: both stamp, "
          "the hop limit is decremented once", out=carried(twice, 3, hlim=62))
    f.add("local", carried(local, 1), "two functions and the egress on one "
          "node", out=decremented(inner(dst=host(local))))
    f.add("local-2", carried(local, 2), "comes in at the second function",
          out=decremented(inner(dst=host(local))))
    for path in (four, fourth):
        for position in range(1, len(path.visits)):
            here = inner4(src="203.0.113.7")
            if path is fourth:
                here = inner4(dst="8.8.8.8", src="203.0.113.7")
            if position == len(path.visits) - 1:
                out = decremented4(here)
            else:
                out = carried(path, position + 1, hlim=62, nh=4, carries=here)
            f.add("%s-%d" % (path.chain, position), carried(
                path, position, nh=4, carries=here), "IPv4 inside, position "
                "%d" % position, node=path.visits[position][0], out=out)
    for name, packet in (
            ("options", inner4(options=[IPOption(b"\x94\x04\0\0")])),
            ("fragment", inner4(flags="MF")),
            ("last-fragment", inner4(frag=100)),
            ("esp", inner4(proto=50, what=Raw(bytes(range(40))))),
            ("short", bytes(IP(src=V1, dst=V2, ttl=63, proto=59))),
            ("tcp", inner4(what=TCP(sport=1, dport=80, flags="S"))),
            ("ttl-2", inner4(ttl=2))):
        f.add("four-2-" + name, carried(four, 2, nh=4, carries=packet),
              "IPv4 inside: " + name, node="r6", out=decremented4(packet))
    hop(f, "fields-kept", web, 1, "traffic class, flow label, tag and flags "
        "of others stay", tc=0xb9, fl=0xfffff, tag=0xbeef, flags=0x2a)
    f.add("argument", carried(web, 1, dst="fc00:0:0:201:1:2:3:4"),
          "the SID's lower 64 bits are an argument and not part of the key",
          out=carried(web, 2, hlim=62))
    for k, length in (("empty", 0), ("full", 1200)):
        hop(f, "inner-" + k, web, 3, "%d bytes in the inner packet" % length,
            carries=bytes(IPv6(src=H1, dst=H2, hlim=63, nh=59) /
                          Raw(bytes(length))))
    hop(f, "inner-tcp", web, 3, "TCP inside", carries=inner(
        what=TCP(sport=1, dport=80, flags="S", options=[("MSS", 1440)])))
    hop(f, "inner-ping", web, 3, "ICMPv6 inside", carries=inner(
        what=ICMPv6EchoRequest(id=1, seq=2, data=b"abc")))
    f.add("inner-for-the-egress", carried(web, 3, carries=inner(
        dst="fc00:8::1")), "the inner packet is addressed to the egress "
        "itself", node="r6", expect="deliver")
    f.add("hop-limit-2", carried(web, 1, hlim=2), "the last hop limit that "
          "can be forwarded", out=carried(web, 2, hlim=1))
    f.add("egress-hop-limit-1", carried(web, 3, hlim=1), "the outer hop limit "
          "does not matter where the outer header ends", node="r6",
          out=decremented(inner()))
    f.add("egress-inner-hop-limit-2", carried(web, 3, carries=inner(hlim=2)),
          "the last inner hop limit that can be forwarded", node="r6",
          out=inner(hlim=1))
    f.add("padded-frame", carried(web, 1) + bytes(6), "bytes behind the packet, as "
          "Ethernet pads", out=carried(web, 2, hlim=62) + bytes(6))
    big = (1 << 64) - 1
    for path in (web, ordered, unordered):
        kind = path.world()["scheme"]
        for label, v in (("ones", (big, big)), ("zero", (0, 0)),
                         ("prime", (PRIME, PRIME))):
            f.add("transit-%s-%s" % (kind, label), carried(path, 2, values=v),
                  "transit hops stamp whatever they find", node="r3",
                  out=carried(path, 3, values=path.stamp(2, *v), hlim=62))
    return f


def flows():
    f = File("flows", "keyed-flow: what stamps are bound to.")
    to = host(bound)

    def at(position, carries, says, hlim, **kw):
        bound.flow = says
        return carried(bound, position, carries=carries, hlim=hlim, **kw)

    def all_over(name, note, carries, says, **kw):
        """A packet whose stamps are those of the flow that is said."""
        for position in (1, 2, 3):
            node = bound.visits[position][0]
            gone = decremented(carries) if position == 3 else \
                at(position + 1, carries, says, 62, **kw)
            f.add("%s-%d" % (name, position), at(
                position, carries, says, 63, **kw), note, node=node, out=gone)
        outside = carries[:7] + b"\x40" + carries[8:]
        bound.flow = says
        out = outer(bound.sid(1), srh(bound.segments(), 2, bound.tlv(
            bound.values(1, rnd(7)))) + decremented(outside), fl=0)
        f.add(name + "-0", outside, note, node="r1", port="edge", counter=7,
              out=out)

    def packet(what, **kw):
        return bytes(IPv6(src=H1, dst=to, hlim=63, **kw) / what)

    udp, tcp = flow(H1, to, 17, 4242, 53), flow(H1, to, 6, 1024, 80)
    sent = packet(UDP(sport=4242, dport=53) / Raw(b"waystamp"))
    all_over("flow-udp", "UDP", sent, udp)
    all_over("flow-tcp", "TCP", packet(
        TCP(sport=1024, dport=80, flags="S", options=[("MSS", 1440)])), tcp)
    all_over("flow-ping", "ICMPv6 has no ports", packet(
        ICMPv6EchoRequest(id=1, seq=2, data=b"abc")), flow(H1, to, 58))
    all_over("flow-none", "no next header", packet(b"", nh=59),
             flow(H1, to, 59))
    for n, name in ((132, "sctp"), (33, "dccp"), (136, "udplite")):
        all_over("flow-" + name, "protocol %d has ports in its first four "
                 "bytes" % n, packet(Raw(bytes.fromhex("0004000512345678")),
                                     nh=n), flow(H1, to, n, 4, 5))
    all_over("flow-other", "protocol 47 has no ports", packet(
        Raw(bytes.fromhex("00040005")), nh=47), flow(H1, to, 47))
    all_over("flow-options", "UDP behind hop-by-hop and destination options",
             packet(IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() /
                    UDP(sport=4242, dport=53)), udp)
    all_over("flow-ah", "UDP behind an authentication header, whose length is "
             "counted otherwise", packet(
                 bytes(AH(nh=17, payloadlen=4, spi=1, seq=1, icv=bytes(12))) +
                 bytes(UDP(sport=4242, dport=53)), nh=51), udp)
    all_over("flow-fragment", "a first fragment has ports, which later ones "
             "cannot show: none counts", packet(
                 IPv6ExtHdrFragment(nh=17, offset=0, m=1, id=7) /
                 UDP(sport=4242, dport=53)), flow(H1, to, 17))
    all_over("flow-last-fragment", "a last fragment", packet(
        IPv6ExtHdrFragment(nh=17, offset=100, m=0, id=7) / Raw(b"12345678")),
        flow(H1, to, 17))
    all_over("flow-options-254", "256 bytes of destination options", packet(
        bytes([17, 31]) + bytes([1, 252]) + bytes(252) +
        bytes(UDP(sport=4242, dport=53)), nh=60), udp)

    def four(name, note, says, what, **kw):
        carries = bytes(IP(src="192.0.2.1", dst="198.51.100.2", **kw) / what)
        for position in (1, 2):
            f.add("%s-%d" % (name, position), at(
                position, carries, says, 63, nh=4), note,
                node=bound.visits[position][0],
                out=at(position + 1, carries, says, 62, nh=4))

    pair = "192.0.2.1", "198.51.100.2"
    four("flow-ipv4", "IPv4", flow(*pair, 17, 4242, 53),
         UDP(sport=4242, dport=53) / Raw(b"waystamp"))
    four("flow-ipv4-options", "IPv4 with options", flow(*pair, 6, 1024, 80),
         TCP(sport=1024, dport=80), options=[IPOption_NOP()] * 8)
    four("flow-ipv4-ping", "ICMP has no ports", flow(*pair, 1), ICMP())
    four("flow-ipv4-fragment", "a first fragment", flow(*pair, 17),
         UDP(sport=4242, dport=53) / Raw(b"waystamp"), flags="MF")
    four("flow-ipv4-last-fragment", "a last fragment", flow(*pair, 17),
         Raw(b"waystamp"), frag=100, proto=17)
    four("flow-ipv4-whole", "an IPv4 packet that must not be cut is no "
         "fragment", flow(*pair, 17, 4242, 53), UDP(sport=4242, dport=53),
         flags="DF")

    def bad(name, note, carries, says, reason="PROOF", position=3, **kw):
        f.drop(name, reason, at(position, carries, says, 63, **kw), note,
               node=bound.visits[position][0])

    for name, note, says in (
            ("source", "another source", flow("fc00:7::3", to, 17, 4242, 53)),
            ("destination", "another destination",
             flow(H1, "fc00:10::3", 17, 4242, 53)),
            ("protocol", "another protocol", flow(H1, to, 6, 4242, 53)),
            ("source-port", "another source port", flow(H1, to, 17, 4243, 53)),
            ("destination-port", "another destination port",
             flow(H1, to, 17, 4242, 54)),
            ("ports-swapped", "the ports swapped",
             flow(H1, to, 17, 53, 4242))):
        bad("flow-other-" + name, "the proof of a packet with " + note, sent,
            says)
    bound.flow = udp
    bad("flow-cml-bit", "one bit of CML changed", sent, udp, values=(
        rnd(7), bound.values(3, rnd(7))[1] ^ 1))
    bad("flow-skipped", "r2 never stamped", sent, udp,
        values=bound.values_of((0, 2), rnd(7)))
    bad("flow-list", "the list is looked at before the proof", sent,
        flow(H1, to, 6), "SEGMENTS",
        segments=[sid(0x401), sid(0x501), bound.sid(3)])

    short = packet(UDP(sport=4242, dport=53))[:43]
    short = short[:4] + b"\0\x03" + short[6:]
    options = bytes.fromhex("3c00010400000000")  # and more of them
    for name, note, what, kw in (
            ("cut", "three bytes of UDP", short, {}),
            ("lying", "a payload length without room for ports",
             sent[:4] + b"\0\3" + sent[6:], {}),
            ("nothing", "half an IPv6 header", sent[:20], {}),
            ("five", "more extension headers than are looked at", packet(
                options * 4 + b"\x11" + options[1:] +
                bytes(UDP(sport=4242, dport=53)), nh=60), {}),
            ("long", "264 bytes of extension headers", packet(
                bytes([60, 31]) + bytes([1, 252]) + bytes(252) + b"\x11" +
                options[1:] + bytes(UDP(sport=4242, dport=53)), nh=60), {}),
            ("no-packet", "UDP where a packet should be", bytes(
                UDP(sport=4242, dport=53)), {"nh": 17})):
        for position in (1, 3):
            bad("flow-%s-%d" % (name, position), note, what, udp, "FLOW",
                position, **kw)
        if not kw and len(what) >= 40 and name != "five":
            f.drop("flow-%s-0" % name, "FLOW", what, note, node="r1",
                   port="edge", counter=7)
    v4 = bytes(IP(src=pair[0], dst=pair[1]) / UDP(sport=4242, dport=53))
    for name, note, what in (
            ("ipv4-cut", "three bytes of UDP in IPv4", v4[:23]),
            ("ipv4-lying", "a total length without room for ports",
             v4[:2] + b"\0\x17" + v4[4:]),
            ("ipv4-header", "an IPv4 header of 16 bytes", b"\x44" + v4[1:]),
            ("ipv4-nothing", "half an IPv4 header", v4[:10]),
            ("ipv4-header-lying", "an IPv4 header longer than the packet",
             v4[:2] + b"\0\x13" + v4[4:]),
            ("ipv4-header-cut", "an IPv4 header that is cut", b"\x4f" + v4[1:])):
        bad("flow-" + name, note, what, flow(*pair, 17, 4242, 53), "FLOW", 1,
            nh=4)
    bad("flow-before-the-list", "whatever else is wrong: it cannot be judged",
        short, udp, "FLOW", segments=[sid(0x401), sid(0x501), bound.sid(3)])
    return f


def csids():
    f = File("csids", "Compressed SIDs (RFC 9800) and reduced headers.")
    for path in (small, squeezed, lean, slim, tiny):
        for position in range(1, len(path.visits)):
            hop(f, "%s-%d" % (path.chain, position), path, position,
                "to %s, Segments Left %d" % (path.at(position),
                                             path.left(position)))
    for position in (1, 2, 6):
        f.add("nearby-%d" % position, carried(nearby, position),
              "all of r2's functions from here on, over the end of a "
              "container", out=carried(nearby, 7, hlim=62))
    hop(f, "nearby-7", nearby, 7, "the egress of them")
    f.add("csid-hop-limit-2", carried(small, 1, hlim=2),
          "the last hop limit that can be forwarded",
          out=carried(small, 2, hlim=1))
    f.drop("csid-hop-limit-1", "HOP_LIMIT", carried(small, 1, hlim=1),
           "a shift counts as a hop")
    f.add("csid-segments-left-0", carried(small, 1, sl=0),
          "Segments Left is 0 as ever: C-SIDs are left",
          out=carried(small, 2, hlim=62))
    f.drop("csid-upper-layer", "UPPER_LAYER", carried(
        small, 1, dst=small.sid(1)), "neither C-SIDs nor segments are left")
    f.drop("csid-upper-layer-first", "UPPER_LAYER", carried(
        small, 1, dst=small.sid(1), hlim=1), "the same, and the hop limit is "
        "used up: the first check counts")
    f.add("csid-argument-first", carried(
        squeezed, 1, dst="fc00:0:0:220:0:0:0:620"), "any argument is "
        "shifted, also one whose first C-SID is 0", out=carried(
        squeezed, 2, dst="fc00:0:0:0:0:0:620:0", sl=1, hlim=62))
    f.add("csid-lowest-bit", carried(squeezed, 1, dst="fc00:0:0:220::1"),
          "the lowest bit is argument", out=carried(
          squeezed, 2, dst="fc00::1:0", sl=1, hlim=62))
    f.add("csid-block-stays", carried(small, 1,
                                      dst="fc00:0:0:223:fe80:ff02:1:2"),
          "no argument leads out of the block", out=carried(
          small, 2, dst="fc00:0:0:fe80:ff02:1:2:0", hlim=62))
    f.drop("csid-not-of-the-flavour", "SEGMENTS_REMAIN", carried(
        web, 3, dst="fc00:0:0:601:201::", sl=1), "the argument of a plain SID "
        "is no C-SID: segments are left in the list", node="r6")
    f.add("csid-argument-of-plain-egress", carried(
        web, 3, dst="fc00:0:0:601:201::"), "the argument of a plain SID says "
        "nothing", node="r6", out=decremented(inner()))
    f.drop("csid-remain", "SEGMENTS_REMAIN", carried(
        small, 3, dst="fc00:0:0:621:323::"), "a C-SID behind the egress's",
        node="r6")
    f.drop("csid-remain-both", "SEGMENTS_REMAIN", carried(
        small, 3, dst="fc00:0:0:621:323::", sl=1), "C-SIDs and segments "
        "behind the egress", node="r6")
    f.drop("csid-loop", "LOOP", carried(
        nearby, 1, segments=[container([nearby.sid(1)] * 5)] * 4, sl=4,
        dst=container([nearby.sid(1)] * 5)), "one SID of this node 25 times: "
        "more than any path has")
    f.drop("csid-loop-18", "LOOP", carried(
        nearby, 1, segments=[container([nearby.sid(1)] * 5)] * 3 +
        [container([nearby.sid(1)] * 2)], sl=4, dst=nearby.sid(1)),
        "one SID of this node 18 times")
    f.drop("csid-loop-17", "UPPER_LAYER", carried(
        nearby, 1, segments=[container([nearby.sid(1)] * 5)] * 3 +
        [nearby.sid(1)], sl=4, dst=nearby.sid(1)),
        "one SID of this node 17 times: the last finds nothing left")

    def bad(name, path, note, reason="SEGMENTS", **kw):
        f.drop(name, reason, carried(path, len(path.visits) - 1, **kw), note,
               node="r6")
    last = container([squeezed.sid(6), squeezed.sid(7)])
    bad("csid-list-not-compressed", squeezed, "the same way with plain SIDs",
        segments=[squeezed.sid(j) for j in range(1, 8)])
    bad("csid-list-packed-otherwise", squeezed, "the same C-SIDs, otherwise "
        "packed", segments=[container([squeezed.sid(j) for j in (1, 2, 3)]),
                            container([squeezed.sid(j)
                                       for j in (4, 5, 6, 7)])])
    bad("csid-list-swapped", squeezed, "two C-SIDs of a container swapped",
        segments=[container([squeezed.sid(j) for j in (1, 3, 2, 4, 5)]), last])
    bad("csid-list-shorter", squeezed, "a C-SID left out",
        segments=[container([squeezed.sid(j) for j in (1, 2, 4, 5)]), last])
    bad("csid-list-reduced", squeezed, "reduced, though the plan's is not",
        segments=[last])
    bad("csid-list-whole", lean, "whole, though the plan's is reduced",
        segments=lean.whole())
    bad("slim-list-whole", slim, "whole, though the plan's is reduced",
        segments=slim.whole())
    bad("csid-skipped", squeezed, "r3 never stamped", "PROOF",
        values=squeezed.values_of((0, 1, 3, 4, 5, 6), rnd(7)))
    f.drop("slim-segments-left-3", "SRH_SEGMENTS_LEFT", carried(
        slim, 1, sl=4), "Segments Left beyond Last Entry + 1, which is 2")
    return f


def tlvs():
    f = File("tlvs", "The TLVs behind the segment list.")
    pad1, pad5 = b"\0", b"\x04\x05" + bytes(5)
    foreign = bytes.fromhex("800611223344aabb")  # type 128, length 6
    unknown = bytes.fromhex("7e0e") + bytes(range(14))
    hmac = bytes.fromhex("0526000000000001") + bytes(range(32))

    def both(name, note, before, after):
        def at(position, hlim):
            return carried(web, position, hlim=hlim, tlvs=before + web.tlv(
                web.values(position, rnd(7))) + after)
        f.add(name + "-2", at(2, 63), note, node="r3", out=at(3, 62))
        f.add(name + "-3", at(3, 63), note + ", at the egress", node="r6",
              out=decremented(inner()))

    both("pad1-before", "eight Pad1 before the proof", pad1 * 8, b"")
    both("padn-before", "PadN and Pad1 before the proof", pad5 + pad1, b"")
    both("pad-after", "padding behind the proof", b"", pad5 + pad1)
    both("foreign-before", "an unknown mutable TLV before", foreign, b"")
    both("foreign-after", "an unknown TLV behind", b"", unknown)
    both("hmac-before", "an HMAC TLV that nobody here checks", hmac, b"")
    both("empty-tlv", "a TLV without a value", b"\x7d\0" + pad1 * 6, b"")
    both("most-tlvs", "128 bytes of TLVs", pad1 * 104, b"")

    good = web.tlv(web.values(1, rnd(7)))
    f.drop("tlv-missing", "TLV_MISSING", carried(web, 1, tlvs=b""),
           "no TLV at all")
    f.drop("tlv-missing-others", "TLV_MISSING", carried(web, 1, tlvs=foreign),
           "only another TLV")
    f.drop("tlv-missing-plain-h-encaps", "TLV_MISSING", carried(
        web, 3, tlvs=b""), "what the kernel's own H.Encaps makes", node="r6")
    f.drop("tlv-type", "TLV_MISSING", carried(
        web, 1, tlvs=b"\x7c" + good[1:]), "type 124: not ours")
    f.drop("tlv-inside-another", "TLV_MISSING", carried(
        web, 1, tlvs=b"\x80\x1e" + bytes(6) + good), "the proof's bytes are "
        "the value of another TLV")
    f.drop("tlv-duplicate", "TLV_DUPLICATE", carried(web, 1, tlvs=good + good),
           "twice the same proof")
    f.drop("tlv-duplicate-apart", "TLV_DUPLICATE", carried(
        web, 1, tlvs=good + foreign + web2.tlv((1, 2))),
        "another proof behind another TLV")
    f.drop("tlv-length-21", "TLV_LENGTH", carried(
        web, 1, tlvs=good[:1] + b"\x15" + good[2:23] + pad1), "length 21")
    f.drop("tlv-length-23", "TLV_LENGTH", carried(
        web, 1, tlvs=good[:1] + b"\x17" + good[2:] + pad1 * 8), "length 23")
    f.drop("tlv-length-0", "TLV_LENGTH", carried(
        web, 1, tlvs=good[:1] + pad1 * 7), "length 0")
    f.drop("tlv-unaligned", "TLV_ALIGNMENT", carried(
        web, 1, tlvs=pad1 * 4 + good + pad1 * 4), "at 4 modulo 8")
    f.drop("tlv-unaligned-1", "TLV_ALIGNMENT", carried(
        web, 1, tlvs=pad1 + good + pad5), "at 1 modulo 8")
    f.drop("tlv-overrun", "TLV_OVERRUN", carried(web, 1, tlvs=good[:16]),
           "the header ends inside the proof")
    f.drop("tlv-overrun-type", "TLV_OVERRUN", carried(
        web, 1, tlvs=good + pad1 * 7 + b"\xfc"), "a type without a length "
        "behind a good proof")
    f.drop("tlv-overrun-foreign", "TLV_OVERRUN", carried(
        web, 1, tlvs=good + b"\x80\x07" + bytes(6)), "another TLV one byte too "
        "long, behind a good proof")
    f.drop("tlv-overrun-before", "TLV_OVERRUN", carried(
        web, 1, tlvs=b"\x80\xff" + bytes(6) + good), "another TLV that would "
        "swallow the proof and more")
    f.drop("tlvs-136-bytes", "SRH_TOO_LONG", carried(
        web, 1, tlvs=good + pad1 * 112), "136 bytes of TLVs")
    return f


def headers():
    f = File("headers", "What can be wrong with the headers of a packet that "
             "is addressed to a SID.")
    good = carried(web, 1)
    tlv = web.tlv(web.values(1, rnd(7)))
    at = 40  # where the SRH starts
    size = 8 + 48 + 24
    f.drop("ipv6-truncated", "TRUNCATED", good[:39], "39 bytes of IPv6 header")
    f.drop("ipv6-missing", "TRUNCATED", b"", "an Ethernet header alone")
    f.add("version-4", b"\x46" + good[1:], "version 4 under IPv6's ethertype: "
          "the kernel's matter", expect="pass")
    f.drop("no-srh-udp", "NO_SRH", outer(
        web.sid(1), bytes(UDP(sport=1, dport=2)), nh=17), "UDP to a SID")
    f.drop("no-srh-ipv6", "NO_SRH", outer(web.sid(3), inner(), nh=41),
           "IPv6 in IPv6 to the egress SID: never stamped", node="r6")
    f.drop("fragment-before", "OUTER_FRAGMENT", outer(
        web.sid(1), bytes.fromhex("2b00000100000001") + good[at:], nh=44),
        "a fragment header before the SRH")
    for position, node in ((1, "r2"), (3, "r6")):
        f.drop("fragment-behind-%d" % position, "OUTER_FRAGMENT", carried(
            web, position, nh=44, carries=bytes(IPv6ExtHdrFragment(
                nh=41, offset=0, m=1, id=77)) + inner()),
            "a fragment header behind the SRH", node=node)
    f.drop("locator-itself", "NO_SRH", outer(
        "fc00:0:0:200::", bytes(UDP(sport=1, dport=2)), nh=17),
        "UDP to an address in the locator that is no SID")
    f.drop("routing-type-2", "ROUTING_TYPE", outer(web.sid(1), bytes(
        IPv6ExtHdrRouting(nh=59, type=2, segleft=1, addresses=[H2]))),
        "a routing header of type 2")
    f.drop("routing-type-0", "ROUTING_TYPE", carried(web, 1, typ=0),
           "an SRH that says type 0")
    for n, note in ((0, "nothing behind the IPv6 header"),
                    (7, "7 bytes of SRH"), (8, "no segment list"),
                    (size - 1, "one byte short")):
        f.drop("srh-truncated-%d" % n, "SRH_TRUNCATED", cut(good, at + n),
               note)
    f.drop("payload-length", "PAYLOAD_LENGTH", good[:-1], "the last byte of "
           "the inner packet is missing")
    f.drop("payload-length-at-srh", "PAYLOAD_LENGTH", good[:at + 7],
           "cut within the SRH, which the payload length tells first")
    f.drop("payload-length-no-srh", "PAYLOAD_LENGTH", outer(
        web.sid(1), bytes(UDP(sport=1, dport=2)), nh=17)[:-1],
        "cut, and without an SRH")
    f.drop("payload-length-egress", "PAYLOAD_LENGTH", carried(web, 3)[:-1],
           "cut on its way", node="r6")
    zero = good[:4] + bytes(2) + good[6:]
    f.add("payload-length-0", zero, "payload length 0, as a jumbo "
          "super-packet has", out=carried(web, 2, hlim=62)[:4] + bytes(2) +
          carried(web, 2, hlim=62)[6:])
    f.drop("srh-hdrlen-255", "SRH_TRUNCATED", carried(web, 1, hdrlen=255),
           "Hdr Ext Len beyond the packet")
    f.drop("last-entry-3", "SRH_LAST_ENTRY", carried(
        web, 1, tlvs=b"", last_entry=3), "Last Entry 3 with three segments")
    f.drop("last-entry-4", "SRH_LAST_ENTRY", carried(web, 1, last_entry=4),
           "a fifth segment that only half fits, in the TLVs' place")
    f.drop("last-entry-255", "SRH_LAST_ENTRY", carried(web, 1, last_entry=255),
           "Last Entry 255")
    f.drop("hdrlen-0", "SRH_LAST_ENTRY", carried(
        web, 1, hdrlen=0, last_entry=0), "an SRH without any room")
    f.drop("hdrlen-1", "SRH_LAST_ENTRY", carried(
        web, 1, hdrlen=1, last_entry=0), "room for half a segment")
    f.drop("segments-left-4", "SRH_SEGMENTS_LEFT", carried(web, 1, sl=4),
           "Segments Left one beyond Last Entry + 1")
    f.drop("segments-left-255", "SRH_SEGMENTS_LEFT", carried(web, 1, sl=255),
           "Segments Left 255")
    segs = web.segments()
    here = carried(web, 1, segments=segs[1:], sl=2)
    f.add("reduced", here, "a reduced SRH: Segments Left is Last Entry + 1, "
          "the first segment stands in no list",
          out=carried(web, 2, segments=segs[1:], sl=1, hlim=62))
    f.drop("reduced-at-egress", "SEGMENTS", carried(
        web, 3, segments=segs[1:]), "the proof is right, the list lacks its "
        "first segment", node="r6")
    seventeen = [sid(0x700 + i) for i in range(14)] + segs
    f.drop("segments-17", "SRH_TOO_LONG", carried(
        web, 1, segments=seventeen, sl=2), "17 segments")
    full = srh(segs, 2, b"\0" * 128 + tlv) + inner()
    f.drop("tlvs-152", "SRH_TOO_LONG", outer(web.sid(1), full, hlim=63),
           "152 bytes of TLVs")
    most = [sid(0x700 + i) for i in range(13)] + segs
    f.add("segments-16-foreign", carried(web, 1, segments=most, sl=2),
          "16 segments, most of them not ours: only the egress judges lists",
          out=carried(web, 2, segments=most, sl=1, hlim=62))
    f.drop("hop-limit-1", "HOP_LIMIT", carried(web, 1, hlim=1), "hop limit 1")
    f.drop("hop-limit-0", "HOP_LIMIT", carried(web, 1, hlim=0), "hop limit 0")
    f.drop("upper-layer", "UPPER_LAYER", carried(web, 1, sl=0),
           "no segments left at a function")
    f.drop("upper-layer-first", "UPPER_LAYER", carried(
        web, 1, sl=0, hlim=1), "no segments left and the hop limit used up: "
        "the first check counts")
    f.drop("segments-remain", "SEGMENTS_REMAIN", carried(web, 3, sl=1),
           "one segment left at the egress", node="r6")
    f.drop("most-visits", "UPPER_LAYER", carried(
        twice, 1, segments=[twice.sid(1)] * 16, sl=16),
        "one SID of this node 16 times, after itself: the 17th visit finds no "
        "segments left")
    for name, to in (("host", H2), ("next-door", "fc00:0:1:301::"),
                     ("own-address", "fc00:1::2"), ("link-local", "fe80::1")):
        f.drop("segment-outside-" + name, "SEGMENT_OUTSIDE", carried(
            web, 1, segments=[segs[0], to, segs[2]]),
            "the next segment is " + to + ", which is no SID of the domain")
    f.drop("segment-outside-last", "SEGMENT_OUTSIDE", carried(
        twice, 1, segments=[twice.sid(1), twice.sid(2), H2]),
        "two functions of this node, and then a host")
    return f


def options():
    f = File("options", "Hop-by-hop and destination options before the SRH, "
             "which somebody put there between two nodes.")
    ioam = option(0x31, 24)  # may change on the way: RFC 9486 3
    both = (hopopt(ioam), destopt(option(0x1e), PadN(optdata=b"\0\0")))

    def keep(name, path, position, headers, note, **kw):
        node = path.visits[position][0]
        if position == len(path.visits) - 1:
            out = (decremented4 if kw.get("nh") == 4 else decremented)(
                kw.get("carries") or inner(dst=host(path)))
        else:
            out = options_before(
                carried(path, position + 1, hlim=62, **kw), *headers)
        f.add("options-" + name, options_before(
            carried(path, position, **kw), *headers), note, node=node, out=out)

    for position in (1, 2, 3):
        keep("hop-by-hop-%d" % position, web, position, [hopopt(ioam)],
             "hop-by-hop options, position %d of 3" % position)
        keep("destination-%d" % position, unordered, position, [destopt()],
             "destination options, position %d of 3" % position)
        keep("both-%d" % position, ordered, position, both,
             "both, position %d of 3" % position)
    keep("longest-15", longest, 15, both, "16 segments")
    for position in range(1, len(four.visits)):
        keep("four-%d" % position, four, position, both, "IPv4 inside",
             nh=4, carries=inner4(src="203.0.113.7"))
    for position in range(1, len(small.visits)):
        keep("csid-%d" % position, small, position, both, "compressed SIDs")
    f.add("options-local", options_before(carried(local, 1), *both),
          "two functions and the egress on one node",
          out=decremented(inner(dst=host(local))))
    f.add("options-twice", options_before(carried(twice, 1), *both),
          "two functions on one node", out=options_before(
              carried(twice, 3, hlim=62), *both))
    behind = web.tlv(web.values(1, rnd(7))) + bytes(8)
    ahead = b"\x7e\x06" + bytes(6) + web.tlv(web.values(1, rnd(7)))
    for name, tlvs in (("behind", behind), ("ahead", ahead)):
        after = tlvs.replace(web.tlv(web.values(1, rnd(7))),
                             web.tlv(web.values(2, rnd(7))))
        f.add("options-tlvs-" + name, options_before(
            carried(web, 1, tlvs=tlvs), *both), "other TLVs " + name,
            out=options_before(carried(web, 2, tlvs=after, hlim=62), *both))
    keep("256", web, 1, [hopopt(option(0x3e, 124)), destopt(option(0x3e, 124))],
         "as many bytes as are taken")
    keep("pad1-32", web, 1, [destopt(*[Pad1()] * 30, PadN(optdata=bytes(5)),
                                     option(0x1e, 7))],
         "as many options as are taken")
    keep("unknown-hop-by-hop", web, 1, [hopopt(option(0xde))],
         "hop-by-hop options are not looked at")
    keep("two-destination", web, 1, [destopt(), destopt()],
         "destination options twice")
    keep("broken-hop-by-hop", web, 1, [(HOP, bytes.fromhex(
        "00003eff00000000"))], "not even where they are no options")

    def drop(name, reason, headers, note, packet=None, **kw):
        f.drop("options-" + name, reason, options_before(
            packet or carried(web, 1), *headers, **kw), note)

    drop("264", "EXTENSION_FIRST", [hopopt(option(0x3e, 124)),
         destopt(option(0x3e, 132))], "eight bytes too many")
    drop("three", "EXTENSION_FIRST", [*both, destopt()], "three headers")
    drop("hop-by-hop-second", "EXTENSION_FIRST", [destopt(), hopopt()],
         "hop-by-hop options behind others")
    drop("hop-by-hop-twice", "EXTENSION_FIRST", [hopopt(), hopopt()],
         "hop-by-hop options twice")
    drop("pad1-33", "EXTENSION_FIRST", [(DEST, bytes([0, 4]) + bytes(32) +
         bytes([1, 4, 0, 0, 0, 0]))], "33 options")
    for kind in (0x5e, 0x9e, 0xde):
        drop("unknown-%02x" % kind, "OPTION_UNKNOWN", [destopt(option(kind))],
             "an option that must not be passed over")
    drop("unknown-second", "OPTION_UNKNOWN", [hopopt(), destopt(
         option(0x1e), option(0x9e))], "behind one that may")
    drop("length", "OPTION_LENGTH", [(DEST, bytes.fromhex("00001e0500000000"))],
         "an option one byte longer than its header")
    drop("length-missing", "OPTION_LENGTH", [(DEST, bytes.fromhex(
         "000001030000001e"))], "an option without a length")
    whole = options_before(carried(web, 1), *both)
    for n in (41, 47, 40 + 32 + 7, 40 + 32 + 15):
        f.drop("options-cut-%d" % n, "EXTENSION_TRUNCATED", cut(whole, n),
               "cut to %d bytes" % n)
    f.drop("options-cut-srh", "SRH_TRUNCATED", cut(whole, 40 + 32 + 16 + 79),
           "a byte of the SRH is missing")
    drop("udp", "NO_SRH", both, "UDP behind options", outer(
        web.sid(1), bytes(UDP(sport=1, dport=2)), nh=17), behind=17)
    drop("fragment", "OUTER_FRAGMENT", both, "a fragment header behind them",
         outer(web.sid(1), bytes.fromhex("2b00000100000001"), nh=44),
         behind=44)
    drop("routing-type", "ROUTING_TYPE", both, "another routing header",
         outer(web.sid(1), bytes(IPv6ExtHdrRouting(
             nh=59, type=2, segleft=1, addresses=[H2]))))
    f.drop("options-forged", "PROOF", options_before(carried(
        web, 3, values=web.values(2, rnd(7))), *both),
        "a hop was left out", node="r6")
    return f


def proofs():
    f = File("proofs", "Proofs that name what is not there, and proofs that "
             "do not verify.")

    def look(name, reason, on, position, note, dst=None, **tlv):
        f.drop(name, reason, carried(
            on, position, dst=dst, tlvs=on.tlv(on.values(
                position, rnd(7)), **tlv)), note,
            node=on.visits[position][0])

    look("unknown-sid", "UNKNOWN_SID", web, 1, "in r2's locator, but no path "
         "has it", dst="fc00:0:0:2ff::")
    look("unknown-path", "UNKNOWN_PATH", web, 1, "a path that nobody knows",
         path=0x12345678)
    look("unknown-path-0", "UNKNOWN_PATH", web, 1, "path 0", path=0)
    look("unknown-path-swapped", "UNKNOWN_PATH", web, 1, "the path in the "
         "wrong byte order", path=0x0100ed5e)
    look("path-of-another-sid", "UNKNOWN_PATH", web, 1, "a path of this node, "
         "but not of this SID", path=ordered.path)
    look("unknown-epoch", "UNKNOWN_EPOCH", web, 1, "epoch 9", epoch=9)
    look("epoch-of-another-path", "UNKNOWN_EPOCH", web, 1, "epoch 3",
         epoch=ordered.epoch)
    look("unknown-epoch-egress", "UNKNOWN_EPOCH", web, 3, "epoch 9", epoch=9)
    for name, on, position, src, note in (
            ("stranger", web, 1, "fc00:7::2", "a host outside the domain"),
            ("node", ordered, 1, "fc00:1::3", "a node, but no headend"),
            ("upper", web, 3, "fc00:1:1::1", "the upper half differs"),
            ("lower", web, 3, "fc00:1::11", "the lower half differs"),
            ("link-local", web, 1, "fe80::1", "its own link"),
            ("none", web, 1, "::", "nowhere")):
        f.drop("source-" + name, "SOURCE", carried(on, position, src=src),
               "from " + note, node=on.visits[position][0])
    look("scheme-pot", "SCHEME", web, 1, "the packet says pot", scheme=POT)
    look("scheme-keyed-flow", "SCHEME", web, 3, "the packet says keyed-flow",
         scheme=3)
    look("scheme-unknown", "SCHEME", ordered, 1, "the packet says 200",
         scheme=200)
    look("scheme-downgrade", "SCHEME", ordered, 3, "opot's path, the packet "
         "says pot", scheme=POT)

    def bad(name, path, note, values, reason="PROOF", **kw):
        f.drop(name, reason, carried(path, len(path.visits) - 1,
                                     values=values, **kw), note, node="r6")

    for path in (web, ordered, unordered):
        k = path.world()["scheme"] + "-"
        r = rnd(7)
        good_r, good_c = path.values(3, r)
        bad(k + "skipped-1", path, "r2 never stamped",
            path.values_of((0, 2), r))
        bad(k + "skipped-2", path, "r3 never stamped",
            path.values_of((0, 1), r))
        bad(k + "skipped-both", path, "neither r2 nor r3 stamped",
            path.values_of((0,), r))
        bad(k + "skipped-headend", path, "the headend never stamped",
            path.values_of((1, 2), r))
        bad(k + "twice", path, "r2 stamped twice",
            path.values_of((0, 1, 1, 2), r))
        bad(k + "rnd-bit", path, "one bit of RND changed",
            (good_r ^ 1 << 3, good_c))
        bad(k + "cml-bit", path, "one bit of CML changed",
            (good_r, good_c ^ 1 << 40))
        bad(k + "zero", path, "RND and CML are zero", (0, 0))
        bad(k + "cml-zero", path, "never stamped", (r, 0))
        bad(k + "ones", path, "all ones", (M64, M64))
        swapped = path.values_of((0, 2, 1), r)
        assert path.verifies(*swapped) == (path.scheme == POT)
        if path.scheme != POT:
            bad(k + "swapped", path, "r3 stamped before r2", swapped)
    f.add("pot-swapped", carried(unordered, 3, values=unordered.values_of(
        (0, 2, 1), rnd(7))), "pot does not see the order", node="r6",
        out=decremented(inner(dst=host(unordered))))

    # Values that verify, but are not below the prime.
    for path in (ordered, unordered):
        k = path.world()["scheme"] + "-"
        last = len(path.visits) - 1
        up = path.up(last)

        def wire(r, c):
            return r ^ up[0], c ^ up[1]
        r = PRIME + 7
        c = path.values(last, r)[1] ^ up[1]
        assert path.verifies(*wire(r, c))
        bad(k + "range-rnd", path, "RND is p + 7, the sum is right",
            wire(r, c), "RANGE")
        c = path.values(last, 7)[1] ^ up[1]
        assert path.verifies(*wire(7, c + PRIME))
        bad(k + "range-cml", path, "CML is p more than it should be, the sum "
            "is right modulo p", wire(7, c + PRIME), "RANGE")
        bad(k + "range-and-proof", path, "RND is not below p, and the sum is "
            "wrong: proof comes first", wire(PRIME + 7, 1), "PROOF")

    # Numbers that no headend of the path gives, stamped by all who should.
    for name, r, note in (
            ("lane", rnd(7, lane=LANE + LANES), "a lane behind the last"),
            ("counter", rnd(0), "the counter is 0"),
            ("train", rnd(7, frames=64), "a train of 64 frames"),
            ("bit-60", 1 << 60 | rnd(7), "a bit above the lane")):
        for path in (web, unordered):
            k = path.world()["scheme"] + "-"
            bad(k + "number-" + name, path, note, path.values(3, r), "NUMBER")
    for name, r, note in (
            ("last-lane", rnd(7, lane=LANE + LANES - 1), "the last lane"),
            ("last-counter", rnd((1 << 42) - 1), "the last number"),
            ("longest-train", rnd(7, frames=63), "a frame of a train of 63")):
        f.add(name, carried(web, 3, values=web.values(3, r)), note, node="r6",
              out=decremented(inner()))

    # Splices: proofs of one path or epoch on another.
    bad("splice-path", web, "the values of another path's packet",
        special.values(2, rnd(7)))
    bad("splice-epoch", web, "stamped with epoch 2's secrets, names epoch 1",
        web2.values(3, rnd(7)))

    # Segment lists.
    segs = web.segments()
    r4r5 = [sid(0x401), sid(0x501), segs[2]]
    bad("list-r4-r5", web, "the list says r4, r5; the proof is good",
        web.values(3, rnd(7)), "SEGMENTS", segments=r4r5)
    bad("list-r4-r5-unstamped", web, "the list says r4, r5, and neither r2 "
        "nor r3 stamped: the list is looked at first",
        web.values_of((0,), rnd(7)), "SEGMENTS", segments=r4r5)
    bad("list-swapped", web, "the list says dpi before fw; so do the stamps",
        web.values_of((0, 2, 1), rnd(7)), "SEGMENTS",
        segments=[segs[1], segs[0], segs[2]])
    bad("list-short", web, "r2 left out of list and stamps",
        web.values_of((0, 2), rnd(7)), "SEGMENTS", segments=segs[1:])
    bad("list-longer", web, "a segment more", web.values(3, rnd(7)),
        "SEGMENTS", segments=[sid(0x401)] + segs)
    bad("list-argument", web, "a bit in the argument of a list entry",
        web.values(3, rnd(7)), "SEGMENTS",
        segments=[segs[0][:-2] + "::1"] + segs[1:])

    # on-violation: report.
    def reported(name, what, note, values, **kw):
        f.add(name, carried(report, 2, values=values, **kw), note, node="r6",
              report=what, out=decremented(inner(dst=host(report))))

    v = report.values(2, rnd(7))
    reported("report-proof", "PROOF", "reported and let go on",
             (v[0], v[1] ^ 1))
    up = report.up(2)
    r = PRIME + 7
    c = report.values(2, r)[1]
    reported("report-range", "RANGE", "reported and let go on",
             (r ^ up[0], c))
    reported("report-number", "NUMBER", "reported and let go on",
             report.values(2, rnd(0)))
    other = [sid(0x401), report.sid(2)]
    reported("report-segments", "SEGMENTS", "reported and let go on", v,
             segments=other)
    reported("report-both", "SEGMENTS", "two violations in one packet: the "
             "first is reported",
             (v[0], v[1] ^ 1), segments=other)
    f.drop("report-wrong-chain", "WRONG_CHAIN", carried(
        report, 2, carries=inner()), "what is no violation of the proof is "
        "dropped always", node="r6")
    f.drop("report-then-wrong-chain", "WRONG_CHAIN", carried(
        report, 2, carries=inner(), values=(v[0], v[1] ^ 1)),
        "a violation is reported before the refusal", node="r6",
        report="PROOF")
    return f


def inners():
    f = File("inners", "What the egress finds inside.")

    def bad(name, reason, note, behind, path=web, **kw):
        f.drop(name, reason, carried(
            path, len(path.visits) - 1, behind=behind, **kw), note,
            node="r6")

    good = inner()
    bad("inner-ipv4", "WRONG_CHAIN", "web's proof around an IPv4 packet that "
        "no chain takes", bytes(
            IP(src="192.0.2.1", dst="192.0.2.2") / UDP()), nh=4)
    bad("inner-ipv4-other", "WRONG_CHAIN", "web's proof around an IPv4 packet "
        "of another chain", inner4(), nh=4)
    bad("inner-mapped", "WRONG_CHAIN", "four's proof around an IPv6 packet "
        "whose address looks like its own", inner(dst="::ffff:198.51.100.2"),
        path=four)
    bad("inner-mapped-source", "WRONG_CHAIN", "web's proof around an IPv6 "
        "packet from what looks like IPv4", inner(src="::ffff:192.0.2.2"))
    bad("inner-ipv4-truncated-19", "INNER_TRUNCATED", "19 bytes of IPv4 "
        "inside", inner4()[:19], path=four, nh=4)
    bad("inner-version-6", "INNER_VERSION", "version 6 behind next header 4",
        b"\x65" + inner4()[1:], path=four, nh=4)
    bad("inner-ipv4-header-16", "INNER_VERSION", "an IPv4 header of 16 bytes",
        b"\x44" + inner4()[1:], path=four, nh=4)
    bad("inner-ipv4-behind-41", "INNER_VERSION", "IPv4 behind next header 41",
        inner4(what=UDP() / Raw(bytes(20))), path=four)
    # The inner packet's own length, what carries it, and the frame.
    def cut(name, note, packet, path=web, **kw):
        """What is behind the inner packet does not leave with it."""
        whole = inner4() if path is four else inner(dst=host(path))
        gone = decremented4(whole) if path is four else decremented(whole)
        f.add(name, packet, note, node="r6", out=gone, **kw)

    def said(packet, n):
        """An inner IPv6 packet that says it has a payload of n bytes."""
        return packet[:4] + struct.pack(">H", n) + packet[6:]

    bad("inner-long", "IP6_LENGTH", "a payload length of one byte more than "
        "there is", said(good, len(good) - 39))
    bad("inner-long-65535", "IP6_LENGTH", "the greatest payload length",
        said(good, 65535))
    f.drop("inner-long-behind", "IP6_LENGTH", carried(
        web, 3, behind=said(good, len(good) - 32)) + bytes(8),
        "a payload length that takes bytes behind the outer payload",
        node="r6")
    bad("inner-ipv4-long", "IP4_LENGTH", "a total length of one byte more "
        "than there is", inner4(len=len(inner4()) + 1), path=four, nh=4)
    f.drop("inner-ipv4-long-behind", "IP4_LENGTH", carried(
        four, 2, behind=inner4(len=len(inner4()) + 8), nh=4) + bytes(8),
        "a total length that takes bytes behind the outer payload", node="r6")
    bad("inner-ipv4-len-19", "IP4_LENGTH", "a total length of less than its "
        "header", inner4(len=19), path=four, nh=4)
    bad("inner-ipv4-len-0", "IP4_LENGTH", "a total length of 0", inner4(len=0),
        path=four, nh=4)
    bad("inner-ipv4-header-60", "IP4_LENGTH", "a header longer than the "
        "packet", b"\x4f" + inner4()[1:], path=four, nh=4)
    whole3 = carried(web, 3)
    f.drop("outer-payload-0", "IP6_LENGTH", whole3[:4] + bytes(2) + whole3[6:],
           "an outer payload length of 0", node="r6")
    f.drop("outer-payload-less", "IP6_LENGTH", said(
        whole3, len(whole3) - 41), "an outer payload length of one byte less",
        node="r6")
    f.drop("report-then-inner-long", "IP6_LENGTH", carried(
        report, 2, values=(report.values(2, rnd(7))[0], 1),
        behind=said(inner(dst=host(report)), 99)), "a violation is reported "
        "before the refusal", node="r6", report="PROOF")
    cut("behind-1", "one byte behind the outer payload", carried(web, 3) +
        b"x")
    cut("behind-1000", "1000 bytes behind the outer payload", carried(web, 3) +
        bytes(1000))
    cut("inner-padded", "padding behind the inner packet, in the outer "
        "payload", carried(web, 3, behind=inner() + bytes(6)))
    cut("inner-padded-behind", "and behind that", carried(
        web, 3, behind=inner() + bytes(6)) + bytes(6))
    cut("behind-ipv4", "seven bytes behind the outer payload", carried(
        four, 2, carries=inner4(), nh=4) + bytes(7), path=four)
    cut("inner-ipv4-padded", "padding behind the inner packet, in the outer "
        "payload", carried(four, 2, behind=inner4() + bytes(7), nh=4),
        path=four)
    f.add("behind-for-the-egress", carried(web, 3, carries=inner(
        dst="fc00:8::1")) + bytes(9), "bytes behind the outer payload of a "
        "packet for the egress itself", node="r6", expect="deliver")
    f.drop("behind-super-packet", "IP6_LENGTH", carried(web, 3) + bytes(9),
           "a super-packet with bytes behind the outer payload", node="r6",
           frames=2)
    f.drop("inner-padded-super-packet", "IP6_LENGTH", carried(
        web, 3, behind=inner() + bytes(6)), "a super-packet with bytes behind "
        "its inner packet", node="r6", frames=2)
    f.drop("inner-padded-super-packet-ipv4", "IP4_LENGTH", carried(
        four, 2, behind=inner4() + bytes(6), nh=4), "the same of IPv4",
        node="r6", frames=2)
    bad("inner-ttl-1", "INNER_HOP_LIMIT", "inner TTL 1", inner4(ttl=1),
        path=four, nh=4)
    bad("inner-ttl-0", "INNER_HOP_LIMIT", "inner TTL 0", inner4(ttl=0),
        path=four, nh=4)
    for name, dst in (("multicast", "224.0.0.1"), ("loopback", "127.0.0.1"),
                      ("link-local", "169.254.1.1"), ("zero", "0.1.2.3"),
                      ("broadcast", "255.255.255.255")):
        bad("inner-ipv4-" + name, "WRONG_CHAIN", "to " + dst, inner4(
            dst=dst, src="203.0.113.5"), path=fourth, nh=4)
    bad("inner-ipv4-from-link-local", "WRONG_CHAIN", "from link-local",
        inner4(src="169.254.1.1"), path=four, nh=4)
    bad("inner-ethernet", "INNER_PROTOCOL", "an Ethernet frame inside",
        ether(good), nh=143)
    bad("inner-udp", "INNER_PROTOCOL", "no packet inside, but UDP",
        bytes(UDP(sport=1, dport=2)), nh=17)
    bad("inner-nothing", "INNER_PROTOCOL", "no next header", bytes(8), nh=59)
    bad("inner-second-routing-header", "INNER_PROTOCOL", "a second routing "
        "header", srh([H2], 0, b"") + good, nh=43)
    bad("inner-truncated-39", "INNER_TRUNCATED", "39 bytes inside", good[:39])
    bad("inner-truncated-0", "INNER_TRUNCATED", "nothing inside", b"")
    bad("inner-version-4", "INNER_VERSION", "version 4 behind next header 41",
        b"\x45" + good[1:])
    bad("inner-hop-limit-1", "INNER_HOP_LIMIT", "inner hop limit 1",
        inner(hlim=1))
    bad("inner-hop-limit-0", "INNER_HOP_LIMIT", "inner hop limit 0",
        inner(hlim=0))
    f.add("inner-hop-limit-1-for-the-egress", carried(web, 3, carries=inner(
        dst="fc00:8::1", hlim=1)), "inner hop limit 1, not to be forwarded",
        node="r6", expect="deliver")
    bad("wrong-chain", "WRONG_CHAIN", "web's proof around a packet of the "
        "chain ordered", inner(dst=host(ordered)))
    bad("wrong-chain-source", "WRONG_CHAIN", "web's proof around a packet "
        "that its source gives to the chain special",
        inner(src="fc00:7::5:0:0:2"))
    bad("no-chain", "WRONG_CHAIN", "web's proof around a packet that no chain "
        "takes", inner(dst="fc00:99::1"))
    bad("inner-sid", "WRONG_CHAIN", "web's proof around a packet to a SID",
        inner(dst="fc00:0:0:601::"))
    bad("inner-from-sid", "WRONG_CHAIN", "web's proof around a packet from a "
        "SID, which no headend takes", inner(src="fc00:0:0:601::"))
    f.drop("ecn-not-ect", "ECN", carried(web, 3, tc=3), "congestion was met, "
           "and the inner packet cannot say so", node="r6")
    # RFC 6040, figure 4. What else the traffic class says stays inside.
    for out, within, becomes in ((0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 3),
                                 (1, 0, 0), (1, 1, 1), (1, 2, 1), (1, 3, 3),
                                 (2, 0, 0), (2, 1, 1), (2, 2, 2), (2, 3, 3),
                                 (3, 1, 3), (3, 2, 3), (3, 3, 3)):
        f.add("ecn-%d-%d" % (out, within), carried(
            web, 3, tc=0xb8 | out, carries=inner(tc=0x28 | within)),
            "ECN %d outside, %d inside" % (out, within), node="r6",
            out=decremented(inner(tc=0x28 | becomes)))
    bad("inner-link-local", "WRONG_CHAIN", "web's proof around a link-local "
        "packet", inner(dst="fe80::1"))
    f.drop("ecn4-not-ect", "ECN", carried(four, 2, tc=3, carries=inner4(),
           nh=4), "congestion was met, and the inner IPv4 packet cannot say so",
           node="r6")
    for out, within, becomes in ((0, 3, 3), (1, 1, 1), (1, 2, 1), (2, 2, 2),
                                 (3, 1, 3), (3, 2, 3), (3, 3, 3)):
        f.add("ecn4-%d-%d" % (out, within), carried(
            four, 2, tc=0xb8 | out, nh=4,
            carries=inner4(tos=0x28 | within)),
            "ECN %d outside, %d inside IPv4" % (out, within), node="r6",
            out=decremented4(inner4(tos=0x28 | becomes)))
    wrong = inner4()[:10] + b"\x12\x34" + inner4()[12:]
    # RFC 1624: the difference to the right one stays.
    was = struct.unpack(">H", inner4()[10:12])[0]
    now = struct.unpack(">H", decremented4(inner4())[10:12])[0]
    off = (0x1234 - was + now) % 0xffff
    f.add("inner-ipv4-checksum", carried(four, 2, carries=wrong, nh=4),
          "a wrong header checksum stays as wrong as it was", node="r6",
          out=decremented4(inner4())[:10] + struct.pack(">H", off) +
          inner4()[12:])
    f.add("inner-ipv4-for-the-egress", carried(four, 2, carries=inner4(
        dst="198.51.100.1", ttl=1), nh=4), "the inner IPv4 packet is addressed "
        "to the egress itself", node="r6", expect="deliver")
    return f


def core():
    f = File("core", "Packets on core interfaces that are not addressed to a "
             "SID of the node.")

    def same(name, packet, note, node="r6", **kw):
        f.add(name, packet, note, node=node, expect="pass", **kw)

    f.add("arp", None, "ARP", node="r6", expect="pass", frame=bytes(
        Ether(**{**ETHER, "dst": "ff:ff:ff:ff:ff:ff"}) /
        ARP(hwsrc="02:00:00:00:00:01", psrc="192.0.2.1", pdst="192.0.2.2")))
    def v4(name, note, packet, expect="pass", **kw):
        f.add(name, packet, note, **{"node": "r6", "type": 0x0800, **kw},
              expect=expect)
    v4("ipv4", "IPv4 that no chain takes", inner4(dst="192.0.2.2"))
    v4("unproven-ipv4", "IPv4 that a chain requires", inner4(),
       "drop UNPROVEN")
    v4("unproven-ipv4-source", "IPv4 that a chain requires by its source",
       inner4(dst="8.8.8.8", src="203.0.113.1"), "drop UNPROVEN")
    v4("unproven-ipv4-wrong", "with a header that says nothing right",
       inner4(chksum=1, len=3), "drop UNPROVEN")
    v4("unproven-ipv4-link-local", "to where no router forwards, but Linux "
       "does", inner4(dst="169.254.1.1", src="203.0.113.1"), "drop UNPROVEN")
    v4("plain-ipv4-own", "IPv4 to the node itself",
       inner4(dst="198.51.100.1"))
    for name, dst in (("multicast", "224.0.0.251"), ("loopback", "127.0.0.1"),
                      ("broadcast", "255.255.255.255"), ("zero", "0.0.0.9")):
        v4("plain-ipv4-" + name, "to " + dst, inner4(
            dst=dst, src="203.0.113.1"))
    v4("ipv4-elsewhere", "only the egress guards", inner4(), node="r2")
    v4("ipv4-truncated", "19 bytes of IPv4", inner4()[:19], "drop TRUNCATED")
    v4("ipv4-version-6", "version 6 under IPv4's ethertype: the kernel's "
       "matter", b"\x65" + inner4()[1:])
    v4("ipv4-header-16", "a header of 16 bytes: the kernel's matter",
       b"\x44" + inner4()[1:])
    f.drop("mapped", "MAPPED_ADDRESS", inner(dst="::ffff:198.51.100.2"),
           "an IPv6 packet to what stands for IPv4", node="r6")
    f.drop("mapped-source", "MAPPED_ADDRESS", inner(src="::ffff:203.0.113.1",
           dst="fc00:99::1"), "an IPv6 packet from what stands for IPv4",
           node="r6")
    f.drop("mapped-source-sid", "MAPPED_ADDRESS", outer(
        web.sid(3), carried(web, 3)[40:], src="::ffff:1.2.3.4"),
        "the same, to a SID", node="r6")
    ns = bytes(IPv6(src="fe80::1", dst="ff02::1:ff00:2", hlim=255) /
               ICMPv6ND_NS(tgt="fe80::2"))
    same("neighbour-solicitation", ns, "neighbour discovery")
    same("link-local", inner(dst="fe80::2", src="fe80::1"), "link-local")
    same("own-address", inner(dst="fc00:1::6", src="fc00:1::1"),
         "to the node's own address")
    same("plain-transit", inner(dst="fc00:99::1"), "no chain takes it")
    same("sid-of-another-node", carried(web, 1), "to a SID of r2, through r6")
    same("srh-not-ours", outer("fc00:99::1", srh(["fc00:99::1"], 0, b"") +
                               inner()), "somebody else's SRH")
    same("guarded-elsewhere", inner(), "what web requires passes r2: only its "
         "egress guards", node="r2")
    same("chain-source-elsewhere", inner(dst=H1, src=H2), "the way back, which "
         "no chain takes")
    f.drop("unproven", "UNPROVEN", inner(), "plain, though web requires it",
           node="r6")
    f.drop("unproven-hop-limit-1", "UNPROVEN", inner(hlim=1), "plain, though "
           "web requires it, hop limit 1", node="r6")
    f.drop("unproven-special", "UNPROVEN", inner(src="fc00:7::5:0:0:2"),
           "plain, though special requires it", node="r6")
    f.drop("unproven-srh", "UNPROVEN", outer(H2, srh([H2], 0, b"") + inner()),
           "to web's destination, with a foreign SRH", node="r6")
    same("own-address-in-match", inner(dst="fc00:8::1"), "an own address of "
         "the egress, within web's match")
    un = "r6 unarmed"
    same("unarmed-neighbour-solicitation", ns, "lives without a plan", node=un)
    same("unarmed-plain", inner(), "plain traffic on core", node=un)
    same("unarmed-own-address", inner(dst="fc00:1::6"), "an own address",
         node=un)
    f.drop("unarmed-sid", "UNCONFIGURED", carried(web, 3), "to an own SID",
           node=un)
    f.drop("unarmed-locator", "UNCONFIGURED", inner(dst="fc00:0:0:600::1"),
           "into the own locator", node=un)
    f.drop("unarmed-transit-sid", "UNCONFIGURED", carried(web, 1),
           "to another node's SID", node=un)
    f.drop("unarmed-srh-truncated", "UNCONFIGURED", outer(
        "fc00:99::1", bytes.fromhex("3b0002")), "a routing header of which "
        "too little is there to know", node=un)
    f.drop("unarmed-srh-behind-options", "UNCONFIGURED", outer(
        "fc00:99::1", bytes(IPv6ExtHdrDestOpt(nh=43)) +
        srh(["fc00:99::1"], 0, b"") + inner(), nh=60),
        "an SRH behind destination options", node=un)
    f.drop("unarmed-srh", "UNCONFIGURED", outer(
        "fc00:99::1", srh(["fc00:99::1"], 0, b"") + inner()),
        "an SRH to anywhere", node=un)
    same("unarmed-routing-type-2", outer("fc00:1::6", bytes(
        IPv6ExtHdrRouting(nh=59, type=2, segleft=1, addresses=[H2]))),
        "a routing header of another type", node=un)
    return f


def edge():
    f = File("edge", "Packets on an edge interface of the headend r1.")

    def add(name, packet, note, port="edge", node="r1", **kw):
        f.add(name, packet, note, node=node, port=port, **kw)

    def encap(name, path, note, packet=None, counter=7, frames=1, tc=0,
              behind=b"", **kw):
        packet = packet or inner(dst=host(path), tc=tc, hlim=64)
        gone = decremented(packet)
        v = path.values(1, rnd(counter, frames))
        out = outer(path.at(1), srh(path.segments(), path.left(1),
                                    path.tlv(v)) + gone, hlim=64, tc=tc, fl=0)
        add(name, packet + behind, note, counter=counter, out=out,
            frames=frames if frames != 1 else None, **kw)

    encap("edge-web", web2, "keyed; the newest epoch")
    encap("edge-ordered", ordered, "opot")
    encap("edge-unordered", unordered, "pot")
    encap("edge-direct", direct, "one segment")
    encap("edge-longest", longest, "16 segments")
    encap("edge-small", small, "three C-SIDs in one container")
    encap("edge-squeezed", squeezed, "seven C-SIDs in two containers")
    encap("edge-lean", lean, "the same, reduced: one of them in the list")
    encap("edge-slim", slim, "plain SIDs, reduced: the first in no list")
    encap("edge-nearby", nearby, "the list has the last container alone")
    encap("edge-tiny", tiny, "nothing is left to reduce")
    encap("edge-special", special, "the longer source prefix wins",
          packet=inner(src="fc00:7::5:0:0:2", hlim=64))
    encap("edge-traffic-class", web2, "DSCP and ECN", tc=0xb9)
    encap("edge-tcp", web2, "TCP", packet=inner(
        what=TCP(sport=1, dport=80, flags="S"), hlim=64))
    encap("edge-options", web2, "destination options before UDP",
          packet=inner(hlim=64, what=IPv6ExtHdrDestOpt(nh=17) /
                       UDP(sport=1, dport=2)))
    encap("edge-hop-limit-2", web2, "the last that can be forwarded",
          packet=inner(hlim=2))
    encap("edge-first", ordered, "counter 1", counter=1)
    encap("edge-last", ordered, "the last number", counter=(1 << 42) - 1)
    encap("edge-train-2", web2, "two frames in one skb", frames=2)
    encap("edge-train-63", web2, "63 frames in one skb", frames=63)

    def drop(name, reason, packet, note, **kw):
        add(name, packet, note, expect="drop " + reason, **kw)

    def same(name, packet, note, **kw):
        add(name, packet, note, expect="pass", **kw)

    drop("edge-train-64", "TRAIN_TOO_LONG", inner(hlim=64), "64 frames",
         frames=64)
    drop("edge-hop-limit-1", "EDGE_HOP_LIMIT", inner(hlim=1), "hop limit 1")
    drop("edge-hop-limit-0", "EDGE_HOP_LIMIT", inner(hlim=0), "hop limit 0")
    drop("edge-truncated", "EDGE_TRUNCATED", inner()[:39], "39 bytes")
    longer = inner()[:5] + bytes([inner()[5] + 1]) + inner()[6:]
    drop("edge-ip6-long", "IP6_LENGTH", longer, "a payload length beyond the "
         "frame")
    padded = inner(dst=host(web2), hlim=64)
    encap("edge-ip6-padded", web2, "six bytes behind it, which stay outside",
          packet=padded, behind=bytes(6))
    encap("edge-ip6-padded-1000", web2, "1000 bytes behind it",
          packet=padded, behind=bytes(1000))
    drop("edge-ip6-train-length", "IP6_LENGTH", padded + bytes(6), "a "
         "super-packet that is longer than it says", frames=2)
    same("edge-version-4", b"\x46" + inner()[1:], "version 4 under IPv6's "
         "ethertype: the kernel's matter")

    def sized(n):
        return inner(dst=host(direct), hlim=64, what=UDP(sport=1, dport=2) /
                     Raw(bytes(n - 48)))
    encap("edge-chain-mtu", direct, "as large as its chain can carry",
          packet=sized(direct.mtu))
    drop("edge-above-chain-mtu", "CHAIN_MTU", sized(direct.mtu + 1),
         "one byte larger than its chain can carry")
    drop("outside-sid", "OUTSIDE_SID", carried(web, 1), "a whole chain packet "
         "from outside")
    drop("outside-sid-own", "OUTSIDE_SID", inner(dst="fc00:0:0:100::1"),
         "into r1's own locator")
    drop("outside-sid-block", "OUTSIDE_SID", inner(dst="fc00:0:0:ffff::"),
         "into the block, where no node is")
    add("outside-block-next-door", inner(dst="fc00:0:1::1"), "beside the "
        "block", expect="pass")
    drop("outside-source", "OUTSIDE_SOURCE", inner(src="fc00:0:0:200::1"),
         "for a chain, from a SID")
    drop("outside-source-own", "OUTSIDE_SOURCE", inner(
        src="fc00:0:0:200::1", dst="fc00:7::1"), "for the node, from a SID")
    stray = outer("fc00:99::1", srh(["fc00:99::1"], 0, b"") + inner())
    drop("outside-srh", "OUTSIDE_SRH", stray, "an SRH to anywhere")
    drop("outside-srh-chain", "OUTSIDE_SRH", outer(
        H2, srh([H2], 0, b"") + inner()), "an SRH to web's destination")
    drop("outside-srh-own", "OUTSIDE_SRH", outer(
        "fc00:7::1", srh(["fc00:7::1"], 0, b"") + inner()),
        "an SRH to the node's own address")
    drop("outside-srh-truncated", "OUTSIDE_SRH", outer(
        "fc00:99::1", bytes.fromhex("3b0002")), "a routing header of which "
        "too little is there to know")
    srh_here = srh(["fc00:99::1"], 0, b"") + inner()
    for n in (1, 3, 4):
        before = bytes(IPv6ExtHdrDestOpt(nh=60)) * (n - 1) + bytes(
            IPv6ExtHdrDestOpt(nh=43))
        drop("outside-srh-behind-%d" % n, "OUTSIDE_SRH", outer(
            "fc00:99::1", before + srh_here, nh=60),
            "an SRH behind %d other headers" % n)
    drop("outside-srh-behind-hop-by-hop", "OUTSIDE_SRH", outer(
        "fc00:99::1", bytes(IPv6ExtHdrHopByHop(nh=43)) + srh_here, nh=0),
        "an SRH behind hop-by-hop options")
    drop("outside-many-headers", "OUTSIDE_SRH", outer(
        "fc00:99::1", bytes(IPv6ExtHdrDestOpt(nh=60)) * 5 + inner(), nh=60),
        "more headers than are looked through")
    drop("outside-headers-cut", "OUTSIDE_SRH", outer(
        "fc00:99::1", bytes(IPv6ExtHdrDestOpt(nh=60)) + b"\x3b", nh=60),
        "a header of which too little is there")
    same("outside-options", outer("fc00:99::1", bytes(
        IPv6ExtHdrDestOpt(nh=17)) + bytes(UDP(sport=1, dport=2)), nh=60),
        "destination options alone")
    same("outside-routing-type-2", outer("fc00:99::1", bytes(
        IPv6ExtHdrRouting(nh=59, type=2, segleft=1, addresses=[H2]))),
        "a routing header of another type")
    same("edge-own-address", inner(dst="fc00:7::1"), "to the node itself")
    same("edge-link-local", inner(dst="fe80::1", src="fe80::2"), "link-local")
    same("edge-multicast", inner(dst="ff0e::1"), "multicast")
    same("edge-from-link-local", inner(src="fe80::2"), "from a link-local "
         "address: the kernel forwards no such packet")
    same("edge-from-multicast", inner(src="ff02::2"), "from a multicast "
         "address")
    same("edge-unmatched", inner(dst="fc00:99::1"), "no chain takes it")
    drop("edge-unmatched-drop", "UNMATCHED", inner(dst="fc00:99::1"),
         "no chain takes it, and the interface drops those", port="edge-drop")
    same("edge-drop-own-address", inner(dst="fc00:7::1"), "to the node itself",
         port="edge-drop")
    same("edge-drop-link-local", inner(dst="fe80::1"), "link-local",
         port="edge-drop")
    encap("edge-drop-web", web2, "a chain takes it", port="edge-drop")
    drop("edge-unproven", "UNPROVEN", inner(), "at the edge of the egress, "
         "which is no headend of web: it cannot take the chain",
         node="r6")
    un = "r1 unarmed"
    drop("edge-unarmed", "UNCONFIGURED", inner(), "no plan", node=un)
    drop("edge-unarmed-sid", "OUTSIDE_SID", carried(web, 1), "to a SID",
         node=un)
    drop("edge-unarmed-srh", "OUTSIDE_SRH", stray, "with an SRH", node=un)
    same("edge-unarmed-own", inner(dst="fc00:7::1"), "an own address", node=un)
    same("edge-unarmed-link-local", inner(dst="fe80::1"), "link-local",
         node=un)
    same("edge-unarmed-multicast", inner(dst="ff02::1"), "multicast", node=un)
    ipv4 = dict(packet=None, frame=bytes(
        Ether(**ETHER) / IP(src="192.0.2.1", dst="192.0.2.2") / UDP()))
    here = dict(packet=None, frame=bytes(
        Ether(**ETHER) / IP(src="192.0.2.1", dst="192.0.2.254") / UDP()))
    same("edge-ipv4", note="IPv4 that no chain takes", **ipv4)

    def v4(name, packet, note, expect="pass", **kw):
        add(name, packet, note, type=0x0800, expect=expect, **kw)

    def encap4(name, path, packet, note, counter=7, pad=b"", frames=1, **kw):
        v = path.values(1, rnd(counter, frames))
        n = len(path.segments())
        add(name, packet + pad, note, counter=counter, type=0x0800,
            frames=frames if frames != 1 else None,
            out=outer(path.sid(1), srh(path.segments(), n - 1, path.tlv(v),
                                       nh=4) + decremented4(packet), hlim=64,
                      tc=packet[1], fl=0), **kw)

    encap4("edge-four", four, inner4(), "IPv4 by its destination")
    encap4("edge-fourth", fourth, inner4(dst="8.8.8.8", src="203.0.113.9"),
           "IPv4 by its source")
    encap4("edge-four-both", four, inner4(src="203.0.113.9"), "the longer "
           "destination wins")
    encap4("edge-four-tos", four, inner4(tos=0xbb), "DSCP and ECN")
    encap4("edge-four-ttl-2", four, inner4(ttl=2), "the last TTL")
    encap4("edge-four-tcp", four, inner4(what=TCP(sport=1, dport=80)), "TCP")
    encap4("edge-four-ping", four, inner4(what=ICMP(id=1, seq=2)), "ICMP")
    encap4("edge-four-options", four, inner4(options=[
        IPOption(b"\x94\x04\0\0"), IPOption(b"\x01" * 36)],
        what=TCP(sport=1, dport=80)), "40 bytes of options")
    encap4("edge-four-fragment", four, inner4(flags="MF"), "a fragment")
    encap4("edge-four-last-fragment", four, inner4(frag=100), "the last one")
    encap4("edge-four-short", four, bytes(IP(src=V1, dst=V2, ttl=9, proto=59)),
           "20 bytes in all")
    encap4("edge-four-padded", four, inner4(what=TCP(sport=1, dport=80)),
           "with Ethernet's padding, which stays outside", pad=bytes(6))
    encap4("edge-four-drop", four, inner4(), "a chain takes it",
           port="edge-drop")
    encap4("edge-four-train", four, inner4(what=TCP() / Raw(bytes(100))),
           "63 frames in one skb", frames=63)

    def sized4(n):
        return inner4(dst="8.8.8.8", src="203.0.113.9",
                      what=UDP(sport=1, dport=2) / Raw(bytes(n - 28)))
    encap4("edge-fourth-mtu", fourth, sized4(1300), "as large as its chain "
           "can carry")
    v4("edge-fourth-above-mtu", sized4(1301), "one byte larger",
       "drop CHAIN_MTU")
    v4("edge-ttl-1", inner4(ttl=1), "TTL 1", "drop EDGE_HOP_LIMIT")
    v4("edge-ttl-0", inner4(ttl=0), "TTL 0", "drop EDGE_HOP_LIMIT")
    v4("edge-ipv4-checksum", inner4(chksum=1), "a wrong checksum",
       "drop IP4_CHECKSUM")
    v4("edge-ipv4-checksum-options", summed(inner4(options=[
        IPOption(b"\x94\x04\0\0")]))[:21] + b"\x05" + inner4()[18:],
        "options that the checksum does not count", "drop IP4_CHECKSUM")
    v4("edge-ipv4-long", inner4(len=37), "a total length beyond the frame",
       "drop IP4_LENGTH")
    v4("edge-ipv4-len-19", inner4(len=19), "a total length of less than its "
       "header", "drop IP4_LENGTH")
    v4("edge-ipv4-header-60", b"\x4f" + inner4()[1:], "a header longer than "
       "the packet", "drop IP4_LENGTH")
    v4("edge-ipv4-train-length", inner4(len=30), "a super-packet that is "
       "longer than it says", "drop IP4_LENGTH", frames=2)
    v4("edge-ipv4-truncated", inner4()[:19], "19 bytes", "drop EDGE_TRUNCATED")
    v4("edge-ipv4-version-6", b"\x65" + inner4()[1:], "version 6 under IPv4's "
       "ethertype: the kernel's matter")
    v4("edge-ipv4-header-16", b"\x44" + inner4()[1:], "a header of 16 bytes: "
       "the kernel's matter")
    for name, dst, src in (
            ("multicast", "224.0.0.251", "203.0.113.1"),
            ("broadcast", "255.255.255.255", "203.0.113.1"),
            ("loopback", "127.0.0.1", "203.0.113.1"),
            ("zero", "0.0.0.9", "203.0.113.1"),
            ("from-zero", V2, "0.0.0.0"), ("from-loopback", V2, "127.0.0.1"),
            ("from-multicast", V2, "224.0.0.1")):
        v4("edge-ipv4-" + name, inner4(dst=dst, src=src), "the kernel forwards "
           "no such packet", port="edge-drop")
    v4("edge-ipv4-link-local", inner4(dst="169.254.1.1", src="203.0.113.1"),
       "never steered")
    v4("edge-ipv4-from-link-local", inner4(src="169.254.1.1"), "never steered; "
       "Linux would forward it", "drop UNMATCHED", port="edge-drop")
    v4("edge-ipv4-unproven", inner4(), "at the edge of the egress, which is no "
       "headend of it", "drop UNPROVEN", node="r6")
    drop("edge-mapped", "MAPPED_ADDRESS", inner(dst="::ffff:198.51.100.2"),
         "an IPv6 packet to what stands for IPv4")
    drop("edge-mapped-source", "MAPPED_ADDRESS", inner(
        src="::ffff:192.0.2.2"), "an IPv6 packet from what stands for IPv4")
    same("edge-ipv4-own", note="IPv4 to the node itself", port="edge-drop",
         **here)
    drop("edge-ipv4-drop", "UNMATCHED", note="IPv4 where unmatched traffic is "
         "dropped", port="edge-drop", **ipv4)
    drop("edge-ipv4-unarmed", "UNCONFIGURED", note="IPv4 without a plan",
         node=un, **ipv4)
    same("edge-ipv4-unarmed-own", note="IPv4 to the node itself, without a "
         "plan", node=un, **here)
    for tag in 0x8100, 0x88a8, 0x9100, 0x9200, 0x9300:
        f.add("edge-tag-%x" % tag, None, "a tag is in the frame, and nobody "
              "looks below it", node="r1", port="edge",
              expect="drop VLAN_TAGS", frame=ether(Raw(struct.pack(
                  ">HH", 0, 0x86dd) + bytes(inner())), type=tag))
    f.add("edge-unarmed-arp", None, "ARP", node=un, port="edge", expect="pass",
          frame=bytes(Ether(**{**ETHER, "dst": "ff:ff:ff:ff:ff:ff"}) /
                      ARP(hwsrc="02:00:00:00:00:01", psrc="192.0.2.1",
                          pdst="192.0.2.2")))
    return f


def syns():
    f = File("syns", "TCP's SYNs at a headend of chains that lower the MSS.")
    v4dst = "198.51.102.2"
    least = {6: clamped.mss, 4: clamped4.mss}

    def add(name, note, before, after=None, version=6, pad=b""):
        """before and after: IP packets with all of their checksums."""
        after = before if after is None else after
        path = clamped if version == 6 else clamped4
        if version == 4:
            t = IP(before)
            fragment = t.flags.MF or t.frag
            sport, dport = struct.unpack(">HH", before[4 * t.ihl:][:4])
            path.flow = flow(t.src, t.dst, 6, *(
                (0, 0) if fragment else (sport, dport)))
        gone = decremented(after) if version == 6 else decremented4(after)
        v = path.values(1, rnd(7))
        f.add("%s-%d" % (name, version), before + pad, note, node="r1",
              port="edge", counter=7, type=0x86dd if version == 6 else 0x800,
              out=outer(path.at(1), srh(
                  path.segments(), path.left(1), path.tlv(v),
                  nh=41 if version == 6 else 4) + gone, hlim=64, fl=0))

    def ip(version, what, behind=None, **kw):
        if version == 6:
            return bytes(IPv6(src=H1, dst=host(clamped), hlim=64) / (
                behind / what if behind else what))
        return bytes(IP(src=V1, dst=v4dst, ttl=64, id=7, **kw) / what)

    def tcp(raw=b"", options=None, flags="S", data=b"", dataofs=None):
        """Options as bytes are TCP's payload to Scapy, but for dataofs."""
        kw = dict(sport=4242, dport=443, seq=77, flags=flags)
        if options is not None:
            return TCP(options=options, **kw) / Raw(data)
        assert len(raw) % 4 == 0
        return TCP(dataofs=5 + len(raw) // 4 if dataofs is None else dataofs,
                   **kw) / Raw(raw + data)

    def mss(n):
        return b"\x02\x04" + struct.pack(">H", n)

    for v in (6, 4):
        n = least[v]
        rest = [("SAckOK", b""), ("Timestamp", (1, 0)), ("NOP", None),
                ("WScale", 7)]
        for name, flags in (("syn", "S"), ("syn-ack", "SA"), ("ecn", "SEC")):
            add(name, "as Linux sends it", *[ip(v, tcp(
                flags=flags, options=[("MSS", m)] + rest))
                for m in (8940, n)], version=v)
        add("one-more", "one byte more than fits", *[ip(v, tcp(mss(m)))
            for m in (n + 1, n)], version=v)
        add("fits", "what fits", ip(v, tcp(mss(n))), version=v)
        add("less", "less than fits", ip(v, tcp(mss(536))), version=v)
        add("zero", "nothing at all", ip(v, tcp(mss(0))), version=v)
        add("silent", "no options: what is sent then always fits",
            ip(v, tcp()), version=v)
        add("others", "other options", ip(v, tcp(options=rest)), version=v)
        add("odd", "at an odd offset", *[ip(v, tcp(
            b"\x01" + mss(m) + b"\x03\x03\x07")) for m in (8940, n)],
            version=v)
        add("last", "the last of 40 bytes", *[ip(v, tcp(
            b"\x01" * 36 + mss(m))) for m in (65535, n)], version=v)
        add("twice", "said twice, and once less", *[ip(v, tcp(
            mss(m) + mss(100) + b"\x01" + mss(m) + b"\x01" * 3))
            for m in (9000, n)], version=v)
        add("data", "with data, as Fast Open sends it", *[ip(v, tcp(
            mss(m), data=b"waystamp!")) for m in (8940, n)], version=v)
        add("ack", "no SYN", ip(v, tcp(mss(8940), flags="A")), version=v)
        add("end", "behind the end of the options", ip(v, tcp(
            bytes(4) + mss(8940))), version=v)
        for name, raw in (
                ("length-0", b"\x03\0\x07\x01"), ("length-1", b"\x08\1\1\1"),
                ("overrun", b"\x08\x0d\0\0")):
            add("behind-" + name, "behind an option that is not whole",
                ip(v, tcp(raw + mss(8940) + b"\x01" * 4)), version=v)
            add("before-" + name, "before an option that is not whole",
                *[ip(v, tcp(mss(m) + b"\x01" * 4 + raw)) for m in (8940, n)],
                version=v)
        for length in (2, 3, 5, 6):
            add("length-%d" % length, "an option of another length, and the "
                "right one", *[ip(v, tcp(
                    b"\x02" + bytes([length]) + b"\x22" * 4 + b"\x01" * (
                        length - 2 & 3) + b"\x01\x01" + mss(m)))
                    if length == 6 else ip(v, tcp(
                        b"\x02" + bytes([length]) + b"\x22" * (length - 2) +
                        b"\x01" * (-length % 4) + mss(m)))
                    for m in (8940, n)], version=v)
        add("cut", "an option that the header ends in", ip(v, tcp(
            b"\x01\x01\x01\x02")), version=v)
        add("offset-long", "a header longer than the packet", ip(v, tcp(
            mss(8940), dataofs=15)), version=v)
        add("offset-short", "a header shorter than itself", ip(v, tcp(
            mss(8940), dataofs=4)), version=v)
        wrong = [ip(v, tcp(mss(m))) for m in (8940, n)]
        at = (40 if v == 6 else 20) + 16
        wrong = [p[:at] + struct.pack(">H", struct.unpack(
            ">H", p[at:at + 2])[0] + 1) + p[at + 2:] for p in wrong]
        add("wrong", "a checksum that is wrong stays so, by as much", *wrong,
            version=v)

    both = [tcp(mss(m)) for m in (8940, least[6])]
    for name, note, behind in (
            ("options", "behind destination options",
             lambda: IPv6ExtHdrDestOpt(nh=6)),
            ("hop-by-hop", "behind hop-by-hop options",
             lambda: IPv6ExtHdrHopByHop(nh=6)),
            ("routing", "behind a routing header of another type",
             lambda: IPv6ExtHdrRouting(nh=6, type=2, segleft=0,
                                       addresses=["2001:db8::1"])),
            ("four", "behind four extension headers", lambda:
             IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() /
             IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt(nh=6))):
        add("behind-" + name, note, *[ip(6, b, behind()) for b in both])
    add("behind-ah", "AH's receiver would find the change", ip(6, both[0], AH(
        nh=6, spi=1, seq=2, icv=bytes(12))))
    add("fragment", "the first fragment", ip(6, Raw(bytes(both[0])),
                                             IPv6ExtHdrFragment(
        nh=6, id=1, m=1)))
    both = [tcp(mss(m)) for m in (8940, least[4])]
    add("ip-options", "behind options of IPv4", *[ip(
        4, b, options=[IPOption(b"\x94\x04\0\0")]) for b in both], version=4)
    add("padded", "with Ethernet's padding", *[ip(4, b) for b in both],
        version=4, pad=bytes(2))
    add("fragment", "the first fragment", ip(4, both[0], flags="MF"),
        version=4)
    return f


def guards():
    f = File("guards", "Packets without a proof that a chain requires whose "
             "guard does not refuse them, and what is refused all the same.")

    def plain(name, path, note, reason=None, report=None, what=None, **kw):
        f.add(name, what or inner(dst=host(path)), note, report=report,
              expect="drop " + reason if reason else "pass",
              **{"node": "r6", **kw})

    for at in "core", "edge":
        plain("guard-audit-" + at, audited, "counted and let go",
              report="UNPROVEN", port=at)
        plain("guard-audit-ipv4-" + at, audited4, "of IPv4", type=0x0800,
              report="UNPROVEN", what=inner4(dst="198.51.103.2"), port=at)
        plain("guard-off-" + at, unguarded, "let go", port=at)
        plain("guard-enforce-" + at, enforced, "refused", "UNPROVEN", port=at)
    plain("guard-audit-unmatched", audited, "no chain takes it, and the "
          "interface drops those", "UNMATCHED", report="UNPROVEN",
          port="edge-drop")
    # The verdict does not depend on the guard.
    f.drop("guard-audit-proof", "PROOF", carried(
        audited, 2, values=audited.values_of((0,), rnd(7))),
        "r2 has not stamped it", node="r6")
    for path in audited, unguarded:
        f.drop("%s-wrong-chain" % path.chain, "WRONG_CHAIN", carried(
            web, 3, carries=inner(dst=host(path))),
            "web's proof around a packet of this chain", node="r6")
    # Of a fragment the strictest guard counts of those that it could be for.
    r5 = dict(node="r5")
    plain("guard-rule-audit", audit_dns, "by a rule", report="UNPROVEN", **r5)
    plain("guard-rule-unset", enforce_rtp, "another rule's", "UNPROVEN",
          what=inner(dst="fc00:62::2", what=UDP(sport=4242, dport=5004)), **r5)
    plain("guard-rule-none", audit_dns, "no rule's", what=inner(
        dst="fc00:62::2", what=UDP(sport=4242, dport=54)), **r5)

    def part(nh):
        return IPv6ExtHdrFragment(offset=185, nh=nh) / Raw(b"waystamp")

    plain("guard-rule-fragment", audit_dns, "of one or the other",
          "UNPROVEN", what=inner(dst="fc00:62::2", what=part(17)), **r5)
    plain("guard-rule-fragment-audit", audit_web, "both rules' guards audit",
          report="UNPROVEN", what=inner(dst="fc00:63::2", what=part(6),
                                  tc=46 << 2),
          **r5)
    return f


def rules():
    """What each kind of condition takes and leaves, at the headend r4 and at
    the egress r5: behind the proof of the path that takes it, behind that of
    another, and plain."""
    f = File("rules", "Chains by protocol, ports, DSCP and mark.")

    def tc(packet):
        if packet[0] >> 4 == 4:
            return packet[1]
        return (packet[0] & 15) << 4 | packet[1] >> 4

    def arrives(path, packet, src="fc00:1::4"):
        four = packet[0] >> 4 == 4
        gone = decremented4(packet) if four else decremented(packet)
        nh = 4 if four else 41
        at = {"type": 0x800} if four else {}
        return gone, nh, at, outer(
            path.at(1), srh(path.segments(), path.left(1), path.tlv(
                path.values(1, rnd(7))), nh=nh) + gone, hlim=64,
            tc=tc(packet), fl=0, src=src)

    def case(name, path, packet, note, plain="UNPROVEN", enters=True):
        """path: None where no rule takes it; plain: what the guard says; enters:
        False where a rule before it could fit what nobody can read."""
        gone, nh, at, sent = arrives(path or by_dport, packet)
        edge = {"node": "r4", "port": "edge", **at}
        core = {"node": "r5", "port": "core"}
        if path:
            if enters:
                f.add("rule-" + name, packet, note, counter=7, out=sent,
                      **edge)
            else:
                f.drop("rule-" + name, "PORTS_UNREAD", packet, note, **edge)
            f.add("rule-" + name + "-proven", sent, note, out=(
                decremented4 if nh == 4 else decremented)(gone), **core)
        else:
            f.add("rule-" + name, packet, note, expect="pass", **edge)
        # keyed and opot, of this version of IP and of the other
        for other in by_dport, by_sport, by_dport4:
            if other is not path:
                f.drop("rule-%s-proven-for-%s" % (name, other.chain),
                       "WRONG_CHAIN", arrives(other, packet)[3],
                       note + "; the proof is another chain's", **core)
        if path and path is not by_mark:
            f.drop("rule-" + name + "-plain", plain, packet, note, **core, **at)
        elif plain:
            f.add("rule-" + name + "-plain", packet, note, **core, **at,
                  expect="pass" if plain == "UNPROVEN" else "drop " + plain[1:])

    def six(what, **kw):
        return inner(**{"dst": "fc00:60::2", "hlim": 64, "what": what, **kw})

    def tcp(dport, sport=4242):
        return TCP(sport=sport, dport=dport, flags="S")

    def udp(sport, dport=53):
        return UDP(sport=sport, dport=dport) / Raw(b"waystamp")

    def four(what, **kw):
        return inner4(**{"dst": "10.60.1.2", "src": "10.7.1.2", "ttl": 64,
                         "what": what, **kw})

    for port, path in ((442, None), (443, by_dport), (446, by_dport),
                       (449, by_dport), (450, None), (0, None),
                       (65534, None), (443 << 8 & 65535, None)):
        case("dport-%d" % port, path, six(tcp(port)), "ports 443 to 449")
    for port, path in ((4999, None), (5000, by_sport), (5009, by_sport),
                       (5010, None)):
        case("sport-%d" % port, path, six(udp(port)), "ports 5000 to 5009")
    case("dport-of-udp", None, six(udp(4242, 443)), "the rule is for TCP")
    case("sport-of-tcp", None, six(tcp(80, 5000)), "the rule is for UDP")
    case("ports-swapped", None, six(tcp(4242, 443)), "the source port is "
         "no destination port")
    for ports_, path in (((1, 65535), by_both), ((1023, 65535), by_both),
                         ((1024, 65535), None), ((0, 65535), None),
                         ((1, 65534), None)):
        case("both-%d-%d" % ports_, path, six(tcp(ports_[1], ports_[0])),
             "ports 1 to 1023 and 65535")
    for dscp, path in ((45, None), (46, by_dscp), (47, None)):
        for ecn in (0, 1):
            case("dscp-%d-ecn-%d" % (dscp, ecn), path, six(
                udp(1), tc=dscp << 2 | ecn), "DSCP 46, whatever the ECN")
    case("dscp-and-port", by_dport, six(tcp(443), tc=46 << 2),
         "two rules fit: the first by priority")
    case("dscp-zero", by_zero, six(udp(1), src="fc00:7::6:0:0:2"), "DSCP 0 is "
         "a condition too")
    case("dscp-not-zero", None, six(udp(1), src="fc00:7::6:0:0:2", tc=4),
         "DSCP 0 is a condition too")
    case("protocol", by_protocol, six(ICMPv6EchoRequest(id=1, seq=2)),
         "ICMPv6")
    case("protocol-behind-options", by_protocol, six(
        IPv6ExtHdrDestOpt() / ICMPv6EchoRequest(id=1, seq=2)), "ICMPv6 behind "
        "options")
    for a, path in (("5:0:0:2", by_source), ("5:0:ffff:ffff", by_source),
                    ("4:ffff:ffff:ffff", None)):
        case("source-" + a.replace(":", "-"), path, six(
            udp(1), src="fc00:7::" + a), "a source and UDP")
    case("source-tcp", None, six(tcp(1), src="fc00:7::5:0:0:2"),
         "a source and UDP")

    # Ports behind other headers.
    case("hop-by-hop", by_dport, six(IPv6ExtHdrHopByHop() / tcp(443)),
         "a hop-by-hop header before TCP")
    case("two-options", by_dport, six(
        IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / tcp(449)),
        "two headers before TCP")
    case("ah", by_dport, six(AH(nh=6, payloadlen=4, spi=1, seq=1, icv=bytes(
        12)) / tcp(443)), "AH counts in words (RFC 4302 2.2)")
    case("four-options", by_dport, six(
        IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() /
        IPv6ExtHdrDestOpt() / tcp(443)), "as many headers as are passed over")
    f.drop("rule-five-options", "UNPROVEN", six(
        IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() /
        IPv6ExtHdrDestOpt() / IPv6ExtHdrDestOpt() / tcp(443)),
        "one header more: suspect", node="r5")
    # All fragments of a datagram go one way, and none has ports.
    for name, kw in (("first", {"offset": 0, "m": 1}),
                     ("last", {"offset": 10, "m": 0}),
                     ("atomic", {"offset": 0, "m": 0})):
        f_ = IPv6ExtHdrFragment(nh=6, id=77, **kw) / tcp(443)
        case("fragment-" + name, None, six(f_), "a fragment has no ports, and "
             "is suspect", plain="!UNPROVEN")
        case("fragment-%s-dscp" % name, by_dscp, six(f_, tc=46 << 2),
             "a fragment has a DSCP, but who knows its ports?", enters=False)
    # What a host reads on behind, and what nobody knows what it is.
    atomic = {"id": 77, "offset": 0, "m": 0}
    for name, what in (
            ("options", IPv6ExtHdrFragment(nh=60, **atomic) /
             IPv6ExtHdrDestOpt() / tcp(443)),
            ("padding", IPv6ExtHdrFragment(nh=60, **atomic) /
             IPv6ExtHdrDestOpt(options=[PadN(optdata=bytes(12))]) / tcp(443)),
            ("routing", IPv6ExtHdrFragment(nh=43, **atomic) /
             IPv6ExtHdrRouting(type=2, segleft=0, addresses=["::"]) /
             tcp(443)),
            ("fragment", IPv6ExtHdrFragment(nh=44, **atomic) /
             IPv6ExtHdrFragment(nh=6, **atomic) / tcp(443)),
            ("first", IPv6ExtHdrFragment(nh=60, id=77, offset=0, m=1) /
             IPv6ExtHdrDestOpt() / tcp(443))):
        case("fragment-hides-" + name, None, six(what), "its Fragment header "
             "names another extension header", plain="!UNPROVEN")
        case("fragment-hides-%s-dscp" % name, by_dscp, six(what, tc=46 << 2),
             "the same, and another chain takes its DSCP", enters=False)
    for nh in (135, 139, 140, 148, 253, 254):
        hidden = IPv6ExtHdrDestOpt(nh=nh) / Raw(
            bytes([6, 0, 1, 4, 0, 0, 0, 0]) + bytes(tcp(443)))
        case("hidden-by-%d" % nh, None, six(hidden), "TCP may be behind such "
             "a header", plain="!UNPROVEN")
        case("hidden-by-%d-dscp" % nh, by_dscp, six(hidden, tc=46 << 2),
             "the same, and another chain takes its DSCP", enters=False)
    case("esp", None, six(IPv6ExtHdrDestOpt(nh=50) / Raw(bytes(16))),
         "ESP is a protocol")
    case("fragment-later-udp", None, six(IPv6ExtHdrFragment(
        nh=17, id=77, offset=10, m=0) / Raw(bytes(8))), "a later fragment is "
        "what the first one says, and may be ICMPv6", plain="!UNPROVEN")
    case("fragment-icmp", by_protocol, six(
        IPv6ExtHdrFragment(nh=58, id=77, offset=10, m=0) / Raw(bytes(8))),
        "a fragment has a protocol")

    # Nobody sees a mark behind the node that it was set on.
    marked = six(udp(1), dst="fc00:61::2")
    case("mark", None, marked, "no mark at an ingress", plain=None)
    f.add("rule-mark-plain", marked, "what is not marked may pass", node="r5",
          port="core", expect="pass")
    gone, _, _, sent = arrives(by_mark, marked)
    f.add("rule-mark-proven", sent, "the proof says that it was marked",
          node="r5", port="core", out=decremented(gone))
    f.drop("rule-mark-proven-elsewhere", "WRONG_CHAIN", arrives(
        by_mark, six(udp(1)))[3], "the rule's other conditions must fit",
        node="r5", port="core")

    nop = [IPOption(b"\x94\x04\0\0")]
    for name, path, what, kw in (
            ("dport", by_dport4, tcp(80), {}),
            ("dport-79", None, tcp(79), {}), ("dport-81", None, tcp(81), {}),
            ("dport-options", by_dport4, tcp(80), {"options": nop}),
            ("dport-many-options", by_dport4, tcp(80), {"options": nop * 10}),
            ("udp", None, udp(1, 80), {}),
            ("icmp", by_protocol4, ICMP(type=8), {}),
            ("icmpv6", None, Raw(bytes(8)), {"proto": 58}),
            ("icmp-fragment", by_protocol4, Raw(bytes(8)),
             {"proto": 1, "frag": 100}),
            ("dscp", by_dscp4, udp(1), {"tos": 10 << 2 | 1}),
            ("dscp-11", None, udp(1), {"tos": 11 << 2}),
            ("dscp-dont-fragment", by_dscp4, udp(1),
             {"tos": 10 << 2, "flags": "DF"}),
            ("dscp-fragment", by_dscp4, udp(1), {"tos": 10 << 2, "frag": 9}),
            ("source", by_source4, udp(1), {"src": "10.7.5.255"}),
            ("source-next", None, udp(1), {"src": "10.7.6.0"}),
            ("source-port", None, udp(1, 54), {"src": "10.7.5.1"}),
            ("esp", None, Raw(bytes(16)), {"proto": 50})):
        case("ipv4-" + name, path, four(what, **kw), "IPv4: " + name)
    for name, kw in (("first", {"flags": "MF"}), ("last", {"frag": 100})):
        case("ipv4-fragment-" + name, None, four(tcp(80), **kw), "a fragment "
             "has no ports, and is suspect", plain="!UNPROVEN")
    for proto in (51, 253):
        hidden = bytes([6, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1]) + bytes(tcp(80))
        case("ipv4-hidden-by-%d" % proto, None, four(Raw(hidden), proto=proto),
             "TCP may be behind it", plain="!UNPROVEN")
    return f


def arguments():
    """Into the function of kind netfilter at ra: its packets go up to the node
    without their outer headers. Only the plan's argument is taken."""
    f = File("arguments", "Arguments of SIDs, at a function of kind netfilter.")

    def into(name, packet, note, **kw):
        f.add("argument-" + name, packet, note, node="ra", expect="deliver",
              **kw)

    def bad(name, reason, packet, note, **kw):
        f.drop("argument-" + name, reason, packet, note, node="ra", **kw)

    into("guest", carried(guest, 1), "the plan's")
    into("staff", carried(staff, 2), "the plan's for another chain")
    into("none", carried(unargued, 1), "none, as in the plan")
    inside = inner4(dst="203.0.113.193")
    into("largest", carried(guest4, 1, nh=4, carries=inside), "of 32 bits all "
         "ones, and IPv4")
    into("stamped", carried(guest, 1, values=(0, 0)), "whatever its proof is: "
         "only the egress verifies")
    into("behind-end", carried(behind_end, 1), "End on this node comes before")
    into("hop-limit", carried(guest, 1, hlim=2), "the last hop limit")
    into("options", options_before(carried(guest, 1), destopt()), "behind "
         "options")
    for name, dst, note in (
            ("wrong", with_argument(guest.sid(1), 8), "another chain's"),
            ("missing", guest.sid(1), "none"),
            ("high-bit", with_argument(guest.sid(1), 7 | 1 << 31), "one bit "
             "more"),
            ("above", with_argument(guest.sid(1), 7 | 1 << 32), "a bit above "
             "the 32 of the argument"),
            ("highest", with_argument(guest.sid(1), 7 | 1 << 63), "the "
             "highest bit of the lower half"),
            ("swapped", with_argument(guest.sid(1), 7 << 24), "in another "
             "byte order")):
        bad(name, "ARGUMENT", carried(guest, 1, dst=dst), note)
    bad("of-none", "ARGUMENT", carried(
        unargued, 1, dst=with_argument(unargued.sid(1), 7)), "of a visit that "
        "has none in the plan")
    bad("of-none-high", "ARGUMENT", carried(
        unargued, 1, dst=with_argument(unargued.sid(1), 1 << 32)), "the same, "
        "a bit above the 32 of the argument")
    bad("wrong-largest", "ARGUMENT", carried(
        guest4, 1, nh=4, carries=inside, dst=with_argument(
            guest4.sid(1), 0xfffffffe)), "one bit less, and IPv4")
    bad("wrong-options", "ARGUMENT", options_before(carried(
        guest, 1, dst=with_argument(guest.sid(1), 8)), destopt()), "behind "
        "options")
    wrong = behind_end.segments()
    bad("wrong-behind-end", "ARGUMENT", carried(
        behind_end, 1, segments=[wrong[0], with_argument(
            behind_end.sid(2), 8), wrong[2]]), "in the list, behind End on "
        "this node")
    for n in (argued_csids.at(2), argued_csids.sid(2)):
        into("csids-%d" % (n == argued_csids.sid(2)), carried(
            argued_csids, 2, dst=n, sl=1), "a container has no room for it: "
            "the plan's alone counts")
    long = [guest.sid(2)] + [sid(0x999)] * 8 + [guest.segments()[0]]
    into("long", options_before(carried(guest, 1, segments=long), destopt(
        option(0x1e, 194))), "432 bytes of headers, as many as are kept")
    bad("too-long", "HEADER_TOO_LONG", options_before(carried(
        guest, 1, segments=long), destopt(option(0x1e, 202))), "440 bytes")
    # What else is wrong comes first, in this order.
    other = with_argument(guest.sid(1), 8)
    bad("upper-layer", "UPPER_LAYER", carried(guest, 1, dst=other, sl=0),
        "no segments are left")
    bad("hop-limit-1", "HOP_LIMIT", carried(guest, 1, dst=other, hlim=1),
        "the hop limit is used up")
    bad("outside", "SEGMENT_OUTSIDE", carried(
        guest, 1, dst=other, segments=[guest.segments()[0], "fc01::1"]),
        "the next segment is outside")
    bad("inner-protocol", "INNER_PROTOCOL", carried(guest, 1, dst=other, nh=59),
        "no packet is inside")
    bad("inner-truncated", "INNER_TRUNCATED", carried(
        guest, 1, dst=other, carries=inner()[:39]), "half a header is inside")
    bad("inner-version", "INNER_VERSION", carried(
        guest, 1, dst=other, nh=4), "IPv6 where the header says IPv4")
    for name, src, dst in (
            ("from-link", "fe80::1", H2), ("to-link", H1, "fe80::1"),
            ("from-many", "ff02::1", H2), ("to-many", H1, "ff0e::1"),
            ("from-sid", guest.sid(1), H2), ("to-sid", H1, guest.sid(1))):
        bad("inner-" + name, "INNER_ADDRESS", carried(
            guest, 1, dst=other, carries=inner(src=src, dst=dst)),
            "from or to what no headend takes")
    bad("inner-ipv4-link", "INNER_ADDRESS", carried(
        guest4, 1, nh=4, carries=inner4(src="169.254.1.1", dst=V2)),
        "the same of IPv4, and the right argument")
    # The headend puts it there, and the egress compares it.
    for path, here in ((guest, inner(dst=host(guest), hlim=64)),
                       (staff, inner(dst=host(staff), hlim=64))):
        f.add("argument-headend-" + path.chain, here, "in the list",
              node="r1", port="edge", counter=7, out=outer(path.at(1), srh(
                  path.segments(), path.left(1), path.tlv(path.values(
                      1, rnd(7)))) + decremented(here), fl=0))
    hop(f, "argument-egress", guest, 2, "in the list", node="r6")
    plain = [guest.sid(1), guest.sid(2)]
    f.drop("argument-egress-missing", "SEGMENTS", carried(
        guest, 2, segments=plain), "the list is without it", node="r6")
    f.drop("argument-egress-wrong", "SEGMENTS", carried(
        guest, 2, segments=[other, guest.sid(2)]), "the list has another",
        node="r6")
    return f


def told(node, about, what):
    """The error that node tells the source of about."""
    fr = next(n["address"] for n in NODES if n["name"] == node)
    to = IPv6(about[:40]).src
    return bytes(IPv6(src=fr, dst=to, hlim=64) / what /
                 Raw(about[:1280 - 48]))


def told4(node, about, what):
    """The same for IPv4: from the node's own address of that version."""
    return bytes(IP(src=LOCAL[node][1], dst=IP(about).src, ttl=64, id=0,
                    flags="DF") / what / Raw(about[:576 - 28]))


def errors():
    f = File("errors", "What the source of a refused packet is told, or not.")
    exceeded, field, upper = (
        lambda: ICMPv6TimeExceeded(code=0),
        lambda at: ICMPv6ParamProblem(code=0, ptr=at),
        lambda at: ICMPv6ParamProblem(code=4, ptr=at))

    def tell(name, reason, packet, note, what, node="r2", about=None, **kw):
        f.drop("error-" + name, reason, packet, note, node=node,
               error=told(node, about or packet, what), **kw)

    def silent(name, reason, packet, note, **kw):
        f.drop("no-error-" + name, reason, packet, note, **kw)

    long = inner(what=UDP(sport=4242, dport=53) / Raw(bytes(range(256)) * 5))
    tell("hop-limit", "HOP_LIMIT", carried(web, 1, hlim=1),
         "RFC 8754 4.3.1.1", exceeded())
    tell("hop-limit-long", "HOP_LIMIT", carried(web, 1, hlim=0, carries=long),
         "as much of the packet as 1280 bytes hold", exceeded())
    tell("hop-limit-odd", "HOP_LIMIT", carried(web, 1, hlim=1, carries=inner(
        what=UDP(sport=1, dport=2) / Raw(b"odd"))),
         "an odd number of bytes", exceeded())
    tell("segments-left", "SRH_SEGMENTS_LEFT", carried(web, 1, sl=4),
         "points at Segments Left", field(43))
    tell("last-entry", "SRH_LAST_ENTRY", carried(web, 1, last_entry=5),
         "points at Segments Left", field(43))
    tell("tlv-overrun", "TLV_OVERRUN", carried(
        web, 1, tlvs=bytes([252, 23]) + bytes(22)),
         "points at Hdr Ext Len", field(41))
    tell("no-srh", "NO_SRH", bytes(IPv6(
        src="fc00:1::1", dst=web.sid(1), fl=0xabcde) / UDP(sport=1, dport=2)),
         "RFC 8986 4.1.1: points at the upper layer", upper(40))
    good = carried(web, 1)
    nexthdr, unknown = (lambda at: ICMPv6ParamProblem(code=1, ptr=at),
                        lambda at: ICMPv6ParamProblem(code=2, ptr=at))
    pads = [hopopt(), destopt()]  # of 8 bytes each
    tell("extension-first", "EXTENSION_FIRST", options_before(
        good, hopopt(option(0x3e, 254))), "RFC 8200 4: points at Next Header",
        nexthdr(6))
    tell("extension-first-second", "EXTENSION_FIRST", options_before(
        good, destopt(), hopopt()), "that of the header before", nexthdr(40))
    tell("extension-first-third", "EXTENSION_FIRST", options_before(
        good, *pads, destopt()), "that of the header before", nexthdr(48))
    for kind in (0x9e, 0xde):
        tell("option-unknown-%02x" % kind, "OPTION_UNKNOWN", options_before(
            good, hopopt(), destopt(option(0x1e), option(kind))),
            "RFC 8200 4.2: points at the option", unknown(40 + 8 + 2 + 6))
    silent("option-discard", "OPTION_UNKNOWN", options_before(
        good, destopt(option(0x5e))), "RFC 8200 4.2: to be discarded")
    silent("option-length", "OPTION_LENGTH", options_before(
        good, (DEST, bytes.fromhex("00001e0500000000"))), "malformed")
    tell("options-hop-limit", "HOP_LIMIT", options_before(carried(
        web, 1, hlim=1), *pads), "behind options", exceeded())
    tell("options-segments-left", "SRH_SEGMENTS_LEFT", options_before(carried(
        web, 1, sl=4), *pads), "behind options", field(43 + 16))
    tell("options-tlv-overrun", "TLV_OVERRUN", options_before(carried(
        web, 1, tlvs=bytes([252, 23]) + bytes(22)), *pads), "behind options",
        field(41 + 16))
    tell("options-no-srh", "NO_SRH", options_before(outer(
        web.sid(1), bytes(UDP(sport=1, dport=2)), nh=17), *pads, behind=17),
        "behind options", upper(40 + 16))
    tell("options-upper-layer", "UPPER_LAYER", options_before(carried(
        web, 1, sl=0), *pads), "behind options", upper(40 + 16 + 8 + 48 + 24))
    tell("options-segments-remain", "SEGMENTS_REMAIN", options_before(carried(
        web, 3, sl=1), *pads), "behind options", field(43 + 16), node="r6")
    tell("options-inner-protocol", "INNER_PROTOCOL", options_before(carried(
        web, 3, nh=59), *pads), "behind options",
        upper(40 + 16 + 8 + 48 + 24), node="r6")
    tell("upper-layer", "UPPER_LAYER", carried(web, 1, sl=0),
         "RFC 8986 4.1.1: points at the upper layer", upper(40 + 8 + 48 + 24))
    tell("segments-remain", "SEGMENTS_REMAIN", carried(web, 3, sl=1),
         "RFC 8986 4.8 S02: points at Segments Left", field(43), node="r6")
    tell("inner-protocol", "INNER_PROTOCOL", carried(web, 3, nh=59),
         "RFC 8986 4.8 S05: points at the upper layer",
         upper(40 + 8 + 48 + 24), node="r6")
    tell("inner-hop-limit", "INNER_HOP_LIMIT", carried(
        web, 3, carries=inner(hlim=1)), "about the inner packet, to its "
        "source", exceeded(), node="r6", about=inner(hlim=1))
    at = {"node": "r1", "port": "edge"}
    tell("edge-hop-limit", "EDGE_HOP_LIMIT", inner(hlim=1),
         "as any router", exceeded(), counter=7, **at)
    echo = inner(hlim=1, what=ICMPv6EchoRequest(id=1, seq=2, data=b"abc"))
    tell("about-echo", "EDGE_HOP_LIMIT", echo, "an echo request is no error",
         exceeded(), counter=7, **at)
    fragment = bytes(IPv6(src=H1, dst=H2, hlim=1, fl=0x12345) /
                     IPv6ExtHdrFragment(nh=17, offset=0, m=1, id=77) /
                     Raw(bytes(24)))
    tell("about-fragment", "EDGE_HOP_LIMIT", fragment, "a first fragment",
         exceeded(), counter=7, **at)
    for size, name in ((1301, "just"), (3000, "far")):
        big = bytes(IPv6(src=H1, dst=host(direct), hlim=63, nh=59) /
                    Raw(bytes(size - 40)))
        tell("chain-mtu-" + name, "CHAIN_MTU", big,
             "%d bytes for a chain that takes 1300" % size,
             ICMPv6PacketTooBig(mtu=1300), counter=7, **at)

    lost = inner(hlim=1, what=ICMPv6DestUnreach() / Raw(inner()))
    silent("about-error", "EDGE_HOP_LIMIT", lost, "RFC 4443 2.4 e.1",
           counter=7, **at)
    silent("about-redirect", "EDGE_HOP_LIMIT", inner(
        hlim=1, what=ICMPv6ND_Redirect()), "RFC 4443 2.4 e.2",
        counter=7, **at)
    silent("about-hidden-error", "EDGE_HOP_LIMIT", bytes(
        IPv6(src=H1, dst=H2, hlim=1) / IPv6ExtHdrDestOpt() /
        IPv6ExtHdrHopByHop() / ICMPv6DestUnreach()),
        "behind options", counter=7, **at)
    silent("about-fragmented-error", "EDGE_HOP_LIMIT", bytes(
        IPv6(src=H1, dst=H2, hlim=1) /
        IPv6ExtHdrFragment(nh=58, offset=4, m=0, id=77) / Raw(bytes(24))),
        "what kind of ICMPv6 it is cannot be told", counter=7, **at)
    silent("from-nobody", "SOURCE", carried(
        web, 1, hlim=1)[:8] + bytes(16) + carried(web, 1, hlim=1)[24:],
        "RFC 4443 2.4 e.6: the unspecified address")
    silent("from-many", "SOURCE", carried(web, 1, hlim=1)[:8] +
           bytes.fromhex("ff0e" + "00" * 13 + "01") +
           carried(web, 1, hlim=1)[24:], "a multicast source")
    silent("from-link-local", "SOURCE", carried(web, 1, hlim=1)[:8] +
           bytes.fromhex("fe80" + "00" * 13 + "01") +
           carried(web, 1, hlim=1)[24:], "it stays on its link")
    silent("from-a-sid", "SOURCE", carried(web, 1, hlim=1)[:8] +
           carried(web, 3)[24:40] + carried(web, 1, hlim=1)[24:],
           "nobody sends from a SID")
    at4 = {"node": "r1", "port": "edge", "counter": 7, "type": 0x800}
    long4 = inner4(ttl=1, what=UDP(sport=4242, dport=53) / Raw(bytes(
        range(256)) * 4))
    for name, about in (
            ("", inner4(ttl=1)), ("-long", long4),
            ("-options", inner4(ttl=1, options=[IPOption(b"\x94\x04\0\0")])),
            ("-odd", inner4(ttl=0, what=UDP(sport=1, dport=2) / Raw(b"odd"))),
            ("-echo", inner4(ttl=1, what=ICMP(type=8))),
            ("-fragment", inner4(ttl=1, flags="MF"))):
        f.drop("error-ipv4-ttl" + name, "EDGE_HOP_LIMIT", about,
               "as any router", error=told4("r1", about, ICMP(type=11)), **at4)
    f.drop("error-ipv4-inner-ttl", "INNER_HOP_LIMIT", carried(
        four, 2, nh=4, carries=inner4(ttl=1)), "behind the egress",
        node="r6", error=told4("r6", inner4(ttl=1), ICMP(type=11)))
    for kind in (3, 4, 5, 11, 12):
        silent("ipv4-about-error-%d" % kind, "EDGE_HOP_LIMIT", inner4(
            ttl=1, what=ICMP(type=kind) / Raw(inner4())), "RFC 1122 3.2.2",
            **at4)
    silent("ipv4-last-fragment", "EDGE_HOP_LIMIT", inner4(ttl=1, frag=100),
           "RFC 1122 3.2.2", **at4)
    for what in (ICMPv6PacketTooBig(mtu=1280), ICMPv6TimeExceeded(),
                 ICMPv6ParamProblem(), ICMPv6DestUnreach()):
        silent("outside-" + type(what).__name__, "OUTSIDE_ERROR", bytes(
            IPv6(src=H1, dst="fc00:1::1") / what / Raw(carried(web, 1))),
            "nobody outside has seen this packet", node="r1", port="edge")
    nowhere(tell, silent, f)
    silent("proof", "PROOF", carried(web, 3, values=(1, 2)),
           "who forges is told nothing", node="r6")
    return f


def nowhere(tell, silent, f):
    """Who is told that there is no way, and of what kind."""
    at = {"node": "r1", "port": "edge", "counter": 7}
    unreachable = ICMPv6DestUnreach
    for path, kind in (gone7, "unreachable"), (gone8, "prohibited"):
        tell("no-route-" + kind, "NO_ROUTE", inner(dst=host(path)),
             "RFC 2473 8.3: to the sender the chain is a link",
             unreachable(code=3), **at)
    silent("no-route-black-hole", "NO_ROUTE", inner(dst=host(gone9)),
           "the route says that nobody is told", **at)
    silent("no-route-about-error", "NO_ROUTE", inner(
        dst=host(gone7), what=unreachable() / Raw(inner())),
        "RFC 4443 2.4 e.1", **at)
    tell("no-route-about-fragment", "NO_ROUTE", bytes(
        IPv6(src=H1, dst=host(gone7), hlim=63) /
        IPv6ExtHdrFragment(nh=17, offset=0, m=1, id=77) / Raw(bytes(24))),
        "a first fragment", unreachable(code=3), **at)
    tell("no-route-behind-own", "NO_ROUTE", inner(dst=host(near7)),
         "the headend has a function too: of its own header nobody is told",
         unreachable(code=3), about=inner(dst=host(near7), hlim=62), **at)
    for path, kind, code in (half7, "unreachable", 0), (half8, "prohibited", 1):
        tell("no-route-at-end-" + kind, "NO_ROUTE", carried(path, 1),
             "RFC 8754 4.3.1.1 S15: whoever made the header",
             unreachable(code=code), about=carried(path, 2, hlim=62))
    silent("no-route-at-end-black-hole", "NO_ROUTE", carried(half9, 1),
           "the route says that nobody is told")
    for n, kind, code in (1, "unreachable", 0), (2, "prohibited", 1):
        to = inner(dst="fc00:8::d%d:0:0:2" % n)
        tell("inner-no-route-" + kind, "INNER_NO_ROUTE", carried(
            web, 3, carries=to), "as any router", unreachable(code=code),
            node="r6", about=to)
    silent("inner-no-route-black-hole", "INNER_NO_ROUTE", carried(
        web, 3, carries=inner(dst="fc00:8::d3:0:0:2")),
        "the route says that nobody is told", node="r6")

    at["type"] = 0x800
    for path, name, ttl in (gone4, "", 63), (near4, "-behind-own", 62):
        to = path.destination.split("/")[0][:-1] + "9"
        for kind, kw in (("", {}), ("-fragment", {"flags": "MF"}),
                         ("-options", {"options": [IPOption(
                             b"\x94\x04\0\0")]})):
            f.drop("error-ipv4-no-route" + name + kind, "NO_ROUTE",
                   inner4(dst=to, **kw), "RFC 2473 8.3: host unreachable",
                   error=told4("r1", inner4(dst=to, ttl=ttl, **kw),
                               ICMP(type=3, code=1)), **at)
        silent("ipv4-no-route-last-fragment" + name, "NO_ROUTE",
               inner4(dst=to, frag=100), "RFC 1122 3.2.2", **at)
        silent("ipv4-no-route-about-error" + name, "NO_ROUTE", inner4(
            dst=to, what=ICMP(type=3, code=1) / Raw(inner4())),
            "RFC 1122 3.2.2", **at)
    for last, kind, code in (66, "unreachable", 1), (82, "prohibited", 13):
        to = inner4(dst="198.51.100.%d" % last)
        f.drop("error-ipv4-inner-no-route-" + kind, "INNER_NO_ROUTE", carried(
            four, 2, nh=4, carries=to), "as any router, RFC 1812 5.2.7.1",
            node="r6", error=told4("r6", to, ICMP(type=3, code=code)))
    silent("ipv4-inner-no-route-black-hole", "INNER_NO_ROUTE", carried(
        four, 2, nh=4, carries=inner4(dst="198.51.100.98")),
        "the route says that nobody is told", node="r6")


def main():
    with open(os.path.join(HERE, "world.json"), "w") as f:
        json.dump({"comment": "Made by make_packets.py; do not edit.",
                   "block": "fc00::/48", "lane": LANE, "lanes": LANES,
                   "nodes": [{**n, "local": LOCAL.get(n["name"], []),
                              "routes": [{"to": to, "kind": kind} for to, kind
                                         in ROUTES.get(n["name"], [])]}
                             for n in NODES],
                   "paths": [p.world() for p in PATHS]}, f, indent=1)
        f.write("\n")
    seen = set()
    for f in (good(), csids(), flows(), tlvs(), headers(), options(),
              proofs(), inners(), core(), edge(), syns(), errors(), rules(),
              arguments(), guards()):
        for b in f.blocks:
            name = b.split("\n")[0]
            assert name not in seen, name
            seen.add(name)
        f.write()


if __name__ == "__main__":
    main()
