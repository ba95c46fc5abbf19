#!/usr/bin/env python3
"""Makes the test packets of the folder mpls, with Scapy and nothing of waystamp.

    /usr/bin/python3 make_mpls.py        # writes world.json and *.txt to mpls/

Chains over labels, in a world of their own: the nodes of make_packets.py, each
with a label. Packets are told as there, but for "out" of packets with labels: it begins
with the stack, and a headend's entropy label is zero in it, and anything from 16 on the
wire. Label entries are Scapy's; the word and the proof TLV behind them are raw bytes.
"""
import json
import os
import struct

from scapy.contrib.mpls import MPLS
from scapy.layers.inet import TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw

from make_packets import (ETHER, HERE, H1, H2, KEYED, KEYED_FLOW, LANE, LANES, LOCAL,
                          NODES, OPOT, POT, V2, File, Path, decremented,
                          decremented4, flow, host, inner, inner4, outer, rnd, sid,
                          srh, through)

SERVICES = 100000
LABEL = {n["name"]: 16000 + int(n["name"][1], 16) for n in NODES}
# What the core routes packets with labels by: IPv4, but for one node.
ADDRESS = {n: "192.0.2.%d" % (200 + LABEL[n] - 16000) for n in LABEL}
ADDRESS["r3"] = "fc00:1::3"
ELI = 7
ENTROPY = 0x54321


class Labels(Path):
    """A path over labels."""

    def world(self):
        return {**super().world(), "type": "sr-mpls"}

    def pair(self, position):
        node, _, s = self.visits[position]
        return LABEL[node], SERVICES + int(s.split(":")[3], 16)

    def entries(self, position, ttl=None, tc=0, entropy=ENTROPY):
        """(label, tc, ttl) of the stack as it comes to position: the headend has
        written a pair for each visit and an entropy pair behind the first label, and
        each hop the next pair over its own, and an entropy pair over the next
        one. Two visits at one node are one hop."""
        nodes = [v[0] for v in self.visits]
        if ttl is None:
            ttl = 64 - sum(1 for j in range(1, position)
                           if nodes[j] != nodes[j - 1])
        node, service = self.pair(position)
        stack = [(node, tc, ttl), (ELI, tc, 64), (entropy, tc, 0),
                 (service, tc, ttl)]
        stack += [(ELI, tc, 64), (entropy, tc, 0)] * (position - 1)
        for j in range(position + 1, len(self.visits)):
            stack += [(label, 0, 64) for label in self.pair(j)]
        return stack


def stack_of(entries, bottom=None):
    """Their bytes. bottom: the index of the one with S; the last, if not given."""
    at = len(entries) - 1 if bottom is None else bottom
    return b"".join(bytes(MPLS(label=label, cos=tc, ttl=ttl, s=int(i == at)))
                    for i, (label, tc, ttl) in enumerate(entries))


def word(nh=41, version=0, flags=0, reserved=0):
    return bytes([version, flags, reserved, nh])


def labelled(path, position, values=None, tlv=None, carries=None, entries=None,
             bottom=None, nh=41, behind=None, **kw):
    """A packet on path as it comes to position, but for what is given, from
    its stack on. behind: what follows the stack."""
    given = {k: kw.pop(k) for k in ("ttl", "tc", "entropy") if k in kw}
    if entries is None:
        entries = path.entries(position, **given)
    if behind is None:
        if values is None:
            values = path.values(position, rnd(7))
        if carries is None:
            carries = inner4(dst=V2) if nh == 4 else inner(dst=host(path))
        behind = (word(nh, **kw) + (path.tlv(values) if tlv is None else tlv) +
                  carries)
    return stack_of(entries, bottom) + behind


def frame(packet, type=0x8847, **kw):
    return bytes(Ether(**{**ETHER, "type": type, **kw}) / Raw(packet))


web = Labels("web", 0x5eed0101, 1, KEYED, through(
    ("fw", 0x201), ("dpi", 0x301), ("", 0x601)), "fc00:8::/64")
web2 = Labels("web", 0x5eed0101, 2, KEYED, web.visits, web.destination)
ordered = Labels("ordered", 0x5eed0102, 3, OPOT, through(
    ("fw", 0x202), ("dpi", 0x302), ("", 0x602)), "fc00:9::/64")
unordered = Labels("unordered", 0x5eed0103, 255, POT, through(
    ("fw", 0x203), ("dpi", 0x303), ("", 0x603)), "fc00:a::/64")
direct = Labels("direct", 0x5eed0104, 0, KEYED, through(("", 0x604)),
                "fc00:b::/64", mtu=1300)
longest = Labels("longest", 0x5eed0105, 1, KEYED, through(
    *[("fw", 0x210 + j) if j % 2 else ("dpi", 0x310 + j)
      for j in range(1, 16)], ("", 0x605)), "fc00:c::/64")
local = Labels("local", 0x5eed0106, 1, KEYED, through(
    ("fw", 0x206), ("cache", 0x207), ("", 0x208)), "fc00:d::/64")
twice = Labels("twice", 0x5eed0107, 1, OPOT, through(
    ("fw", 0x209), ("cache", 0x20a), ("", 0x607)), "fc00:e::/64")
report = Labels("report", 0x5eed0108, 1, OPOT, through(
    ("fw", 0x20b), ("", 0x608)), "fc00:f::/64", on_violation="report")
bound = Labels("bound", 0x5eed010a, 1, KEYED_FLOW, through(
    ("fw", 0x20c), ("dpi", 0x30c), ("", 0x60c)), "fc00:10::/64")
four = Labels("four", 0x5eed010b, 1, KEYED, through(
    ("fw", 0x20d), ("", 0x60d)), "198.51.100.0/24", source="0.0.0.0/0")
# Over SRv6, in the same domain.
segments = Path("segments", 0x5eed0110, 1, KEYED, through(
    ("fw", 0x230), ("", 0x630)), "fc00:20::/64")
PATHS = [web, web2, ordered, unordered, direct, longest, local, twice, report,
         bound, four, segments]
bound.flow = flow(H1, host(bound), 17, 4242, 53)


def hop(f, name, path, position, note, carries=None, nh=41, **kw):
    """A good packet through one position, with what it becomes there."""
    v4 = nh == 4
    carries = carries or (inner4(dst=V2) if v4 else inner(dst=host(path)))
    here = labelled(path, position, carries=carries, nh=nh, **kw)
    if position == len(path.visits) - 1:
        out = decremented4(carries) if v4 else decremented(carries)
    else:
        kw.pop("entries", None)
        kw.pop("bottom", None)
        out = labelled(path, position + 1, carries=carries, nh=nh, **kw)
    f.add(name, None, note, node=path.visits[position][0], out=out,
          frame=frame(here))


def enters(f, name, path, note, packet, out=None, v4=False, **kw):
    """A packet at its headend."""
    entries = path.entries(1, entropy=0, **kw)
    out = (decremented4(packet) if v4 else decremented(packet)) \
        if out is None else out
    made = labelled(path, 1, values=path.values(1, rnd(9)), carries=out,
                    nh=4 if v4 else 41, entries=entries)
    f.add(name, None, note, node="r1", port="edge", counter=9, out=made,
          frame=frame(packet, type=0x800 if v4 else 0x86dd))


def good():
    f = File("good", "Packets with labels that go on.")
    for j in 1, 2, 3:
        hop(f, "mpls-keyed-%d" % j, web, j, "position %d of 3" % j)
    for name, path in (("second-epoch", web2), ("opot", ordered), ("pot", unordered),
                       ("keyed-flow", bound), ("one-visit", direct),
                       ("sixteen", longest)):
        enters(f, "mpls-headend-" + name, path, "H.Encaps over labels: 2k + 2 "
               "entries for k visits", inner(dst=host(path)))
        for j in range(1, len(path.visits)):
            hop(f, "mpls-%s-%d" % (name, j), path, j,
                "position %d of %d" % (j, len(path.visits) - 1))
    enters(f, "mpls-headend-ipv4", four, "the word says IPv4",
           inner4(dst=V2), v4=True)
    for j in 1, 2:
        hop(f, "mpls-ipv4-%d" % j, four, j, "IPv4 inside", nh=4)
    enters(f, "mpls-headend-class", web2, "the class selector of DSCP 46 is 5, in "
           "the entries that may come to the top", inner(dst=host(web), tc=0xb8),
           tc=5)
    enters(f, "mpls-headend-ecn", web2, "RFC 5129 is not spoken: no mark of "
           "congestion goes into labels", inner(dst=host(web), tc=0xbb), tc=5)
    for j in 1, 2:
        hop(f, "mpls-class-%d" % j, web, j, "traffic classes go on", tc=5)

    least = web.entries(1)
    least[3] = (least[3][0], 0, 10)
    made = web.entries(2, ttl=9)
    f.add("mpls-ttl-of-service", None, "the least TTL of what is consumed counts",
          frame=frame(labelled(web, 1, entries=least)),
          out=labelled(web, 2, entries=made))
    f.add("mpls-ttl-two", None, "the least TTL that goes on",
          frame=frame(labelled(web, 1, ttl=2)),
          out=labelled(web, 2, entries=web.entries(2, ttl=1)))
    f.add("mpls-egress-ttl-one", None, "the egress ends the tunnel: the inner "
          "packet's hop limit counts (RFC 3443 5.4, pipe)", node="r6",
          frame=frame(labelled(web, 3, ttl=1)),
          out=decremented(inner(dst=host(web))))
    hop(f, "mpls-entropy-service", web, 1, "an entropy label that is a service "
        "label's number", entropy=SERVICES + 0x301)
    hop(f, "mpls-entropy-last", web, 1, "the largest label", entropy=0xfffff)
    hop(f, "mpls-flags", web, 1, "flags that nobody knows are carried on",
        flags=0x80, reserved=1)
    f.add("mpls-multicast-type", None, "Ethertype 8848 is a label that the sender "
          "has assigned, and not ours", expect="pass",
          frame=frame(labelled(web, 1), type=0x8848))

    # At one node.
    at1, at3 = twice.entries(1), twice.entries(3)
    f.add("mpls-two-visits", None, "two functions on one node are one hop: TTL 63",
          frame=frame(labelled(twice, 1)), out=labelled(twice, 3))
    assert at1[0][2] == 64 and at3[0][2] == 63
    f.add("mpls-three-visits", None, "two functions, and the egress",
          frame=frame(labelled(local, 1)),
          out=decremented(inner(dst=host(local))))
    f.add("mpls-to-the-egress-itself", None, "to an address of the egress",
          node="r6", expect="deliver",
          frame=frame(labelled(web, 3, carries=inner(dst="fc00:8::1"))))

    # On their way to another node.
    for node, note in (("r4", "a node that is on no path"),
                       ("r3", "a node that the packet will come to")):
        f.add("mpls-transit-" + node, None, note + ": TTL less one, the label stays",
              node=node, frame=frame(labelled(web, 1)),
              out=labelled(web, 1, entries=[(LABEL["r2"], 0, 63)] +
                           web.entries(1)[1:]))
    f.add("mpls-transit-others", None, "somebody else's packet for a node's "
          "label: what is behind it is not looked at", node="r4",
          frame=frame(stack_of([(LABEL["r2"], 0, 9)]) + inner()),
          out=stack_of([(LABEL["r2"], 0, 8)]) + inner())
    return f


def shapes():
    """Stacks that routers of the core have changed."""
    f = File("shapes", "Stacks of another shape than ours.")
    # The last router before a node takes its label off.
    f.add("mpls-popped-egress", None, "the node's label was taken off",
          node="r6", frame=frame(labelled(web, 3, entries=web.entries(3)[1:])),
          out=decremented(inner(dst=host(web))))
    r3, r6 = LABEL["r3"], LABEL["r6"]
    s3, s6 = web.pair(2)[1], web.pair(3)[1]
    rest = [(r6, 0, 64), (s6, 0, 64)]
    f.add("mpls-popped-hop", None, "the node's label was taken off, and the packet "
          "keeps its length: the next one's is there twice",
          frame=frame(labelled(web, 1, entries=web.entries(1)[1:])),
          out=labelled(web, 2, entries=[
              (r3, 0, 63), (r3, 0, 63), (ELI, 0, 63), (ENTROPY, 0, 0),
              (s3, 0, 63)] + rest))
    f.add("mpls-hop-label-twice", None, "the node's label twice, as the node "
          "before has written it",
          frame=frame(labelled(web, 1, entries=web.entries(1)[:1] +
                               web.entries(1))),
          out=labelled(web, 2, entries=[
              (r3, 0, 63), (r3, 0, 63), (ELI, 0, 63), (ENTROPY, 0, 0),
              (s3, 0, 63), (ELI, 0, 63), (ENTROPY, 0, 0)] + rest))
    f.add("mpls-hop-no-entropy", None, "no entropy pair: the room of the hop's pair "
          "gets one",
          frame=frame(labelled(web, 1, entries=web.entries(1)[:1] +
                               web.entries(1)[3:])),
          out=labelled(web, 2, entries=[
              (r3, 0, 63), (ELI, 0, 63), (16, 0, 0), (s3, 0, 63)] + rest))
    f.add("mpls-hop-foreign-pair", None, "an entropy pair behind the service "
          "label", frame=frame(labelled(
              web, 1, entries=web.entries(1)[:4] + [(ELI, 0, 7), (99, 0, 0)] +
              web.entries(1)[4:])),
          out=labelled(web, 2, entries=web.entries(2)[:4] + [
              (ELI, 0, 7), (99, 0, 0), (ELI, 0, 64), (ENTROPY, 0, 0)] + rest))
    for entries, name, note in (
            (direct.entries(1)[3:], "bare", "nothing but the service label"),
            (direct.entries(1)[:1] + direct.entries(1)[3:], "no-entropy",
             "no entropy pair"),
            (direct.entries(1)[:1] * 2 + direct.entries(1)[1:], "label-twice",
             "the node's label twice"),
            (direct.entries(1) + [(ELI, 0, 64), (99, 0, 0)], "foreign-pair",
             "an entropy pair behind the service label"),
            (direct.entries(1)[:3] * 9 + direct.entries(1)[3:], "many",
             "28 entries")):
        f.add("mpls-egress-" + name, None, note, node="r6",
              frame=frame(labelled(direct, 1, entries=entries)),
              out=decremented(inner(dst=host(direct))))
    return f


def refused():
    f = File("refused", "Packets with labels that are refused.")

    def drop(name, reason, packet, note, node="r2", **kw):
        f.drop("mpls-" + name, reason, None, note, node=node,
               frame=frame(packet), **kw)

    # The stack.
    whole = labelled(web, 1)
    for n in 0, 3, 4, 15, 16, 31:
        drop("cut-%d" % n, "LABELS_TRUNCATED", whole[:n],
             "%d bytes of a stack of 32" % n)
    drop("no-bottom", "LABELS_TOO_MANY", stack_of(
        [(LABEL["r2"], 0, 64)] * 41, bottom=99) + inner(), "no S bit anywhere")
    drop("forty-one", "LABELS_TOO_MANY", labelled(
        direct, 1, entries=[(LABEL["r6"], 0, 64)] * 40 +
        [direct.entries(1)[3]]), "the bottom is entry 41", node="r6")
    for at, what in ((0, "node label"), (1, "entropy indicator"),
                     (2, "entropy label")):
        drop("bottom-%d" % at, "LABELS_BOTTOM", labelled(web, 1, bottom=at),
             "S at the %s" % what)
    # What is behind it is no word then, and its first byte a label's.
    drop("bottom-3", "WORD_VERSION", labelled(web, 1, bottom=3),
         "S at the service label, moved up: the next label is no word")
    drop("bottom-4", "LABELS_BOTTOM", labelled(
        web, 1, entries=web.entries(1)[:5]), "a node label without a service")
    for label, reason, what in ((0, "LABEL_NULL", "explicit null of IPv4"),
                                (2, "LABEL_NULL", "explicit null of IPv6"),
                                (1, "LABEL_ALERT", "router alert"),
                                (3, "LABEL_UNKNOWN", "implicit null, never sent"),
                                (13, "LABEL_UNKNOWN", "G-ACh, RFC 5586"),
                                (17000, "LABEL_UNKNOWN", "nobody's"),
                                (SERVICES - 1, "LABEL_UNKNOWN",
                                 "one below the services"),
                                (SERVICES + 65536, "LABEL_UNKNOWN",
                                 "one above the services")):
        drop("top-%d" % label, reason, labelled(
            web, 1, entries=[(label, 0, 64)] + web.entries(1)[1:]),
            what + " on top")
    drop("other-node-behind-own", "LABEL_UNKNOWN", labelled(
        web, 1, entries=[(LABEL["r2"], 0, 64), (LABEL["r3"], 0, 64)] +
        web.entries(1)[1:]), "another node's label, but not on top")
    drop("service-of-another", "UNKNOWN_SID", labelled(
        web, 1, entries=[(LABEL["r2"], 0, 64)] + web.entries(2)[1:4] +
        web.entries(1)[4:]), "a service that this node does not have")
    swapped = web.entries(1)
    swapped[3] = (ordered.pair(1)[1], 0, 64)
    drop("service-swapped", "UNKNOWN_PATH", labelled(web, 1, entries=swapped),
         "the service of another path, on the same node")
    drop("hop-limit", "HOP_LIMIT", labelled(web, 1, ttl=1), "TTL 1")
    drop("hop-limit-0", "HOP_LIMIT", labelled(web, 1, ttl=0), "TTL 0")
    least = web.entries(1)
    least[3] = (least[3][0], 0, 1)
    drop("hop-limit-of-service", "HOP_LIMIT", labelled(web, 1, entries=least),
         "TTL 1 of the service label")
    drop("transit-hop-limit", "HOP_LIMIT", labelled(web, 1, ttl=1),
         "TTL 1 on the way", node="r4")
    drop("no-next", "UPPER_LAYER", labelled(
        web, 1, entries=web.entries(1)[:4]), "no pair behind a function's")
    drop("next-unsound", "SEGMENT_OUTSIDE", labelled(
        web, 1, entries=web.entries(1)[:4] + [(LABEL["r3"], 0, 64),
                                             (17000, 0, 64)]),
         "the next service label is none")
    drop("next-node-unknown", "NO_ROUTE", labelled(
        web, 1, entries=web.entries(1)[:4] + [(17000, 0, 64)] +
        web.entries(1)[5:]), "the next node label is nobody's")
    drop("remain", "SEGMENTS_REMAIN", labelled(
        web, 3, entries=web.entries(3)[:4] + web.entries(1)[4:6]),
         "a pair behind the egress's", node="r6")
    drop("encapsulation", "ENCAPSULATION", labelled(
        web, 1, entries=[(LABEL["r2"], 0, 64)] + web.entries(1)[1:3] +
        [(SERVICES + 0x230, 0, 64)] + web.entries(1)[4:],
        tlv=segments.tlv(segments.values(1, rnd(7)))),
        "a path over SRv6, over labels")
    f.drop("mpls-encapsulation-srv6", "ENCAPSULATION", None,
           "a path over labels, over SRv6", frame=bytes(
               Ether(**ETHER, type=0x86dd) / Raw(outer(
                   sid(0x201), srh([sid(0x201), sid(0x301), sid(0x601)], 2,
                                   web.tlv(web.values(1, rnd(7)))) +
                   inner(dst=host(web)), hlim=63))))

    # The word and the proof.
    for n in range(4):
        drop("word-cut-%d" % n, "WORD_TRUNCATED", whole[:32 + n],
             "%d bytes of the word" % n)
    for version, what in ((1, "version 1"), (15, "version 15"),
                          (0x45, "IPv4's first byte"),
                          (0x60, "IPv6's first byte"),
                          (0x10, "an associated channel's (RFC 4385)")):
        drop("word-version-%d" % version, "WORD_VERSION",
             labelled(web, 1, version=version), what)
    for nh in 0, 6, 43, 59, 255:
        drop("word-next-%d" % nh, "WORD_NEXT", labelled(
            web, 1, nh=nh, carries=inner(dst=host(web))),
            "next header %d" % nh)
    for n in 0, 1, 23:
        drop("proof-cut-%d" % n, "PROOF_TRUNCATED", whole[:36 + n],
             "%d bytes of the proof" % n)
    tlv = web.tlv(web.values(1, rnd(7)))
    drop("proof-type", "TLV_MISSING", labelled(web, 1, tlv=b"\xfb" + tlv[1:]),
         "another TLV")
    drop("proof-length", "TLV_LENGTH", labelled(
        web, 1, tlv=tlv[:1] + b"\x15" + tlv[2:]), "length 21")
    drop("unknown-path", "UNKNOWN_PATH", labelled(
        web, 1, tlv=web.tlv(web.values(1, rnd(7)), path=0x5eedffff)),
        "a path that nobody has")
    drop("unknown-epoch", "UNKNOWN_EPOCH", labelled(
        web, 1, tlv=web.tlv(web.values(1, rnd(7)), epoch=9)),
        "an epoch that nobody has")
    drop("scheme", "SCHEME", labelled(
        web, 1, tlv=web.tlv(web.values(1, rnd(7)), scheme=OPOT)),
        "not the plan's scheme")
    drop("proof-empty", "PROOF", labelled(web, 3, values=(rnd(7), 0)),
         "nobody has stamped it", node="r6")
    for left_out in 0, 1, 2:
        drop("proof-without-%d" % left_out, "PROOF", labelled(
            web, 3, values=web.values_of(
                [j for j in range(3) if j != left_out], rnd(7))),
            "position %d has not stamped it" % left_out, node="r6")
    drop("proof-order", "PROOF", labelled(
        web, 3, values=web.values_of([0, 2, 1], rnd(7))),
        "dpi before fw: the stamps alone say so, the list is gone", node="r6")
    drop("number", "NUMBER", labelled(
        web, 3, values=web.values(3, rnd(0))), "a number that no headend gives",
        node="r6")
    drop("flow", "FLOW", labelled(
        bound, 1, carries=inner(dst=host(bound))[:41]),
        "the inner packet's flow cannot be read")
    drop("flow-changed", "PROOF", labelled(
        bound, 3, carries=inner(src="fc00:7::3", dst=host(bound))),
        "another flow than the one that was stamped", node="r6")
    f.add("mpls-reported", None, "on-violation: report", node="r6",
          report="PROOF", frame=frame(labelled(report, 2, values=(rnd(7), 5))),
          out=decremented(inner(dst=host(report))))

    # What is inside.
    drop("inner-none", "INNER_TRUNCATED", labelled(web, 3, carries=b""),
         "nothing behind the proof", node="r6")
    drop("inner-cut", "INNER_TRUNCATED", labelled(
        web, 3, carries=inner(dst=host(web))[:39]),
        "39 bytes of an IPv6 header", node="r6")
    drop("inner-version", "INNER_VERSION", labelled(
        web, 3, carries=b"\x40" + inner(dst=host(web))[1:]),
        "not the version that the word says", node="r6")
    drop("inner-length", "IP6_LENGTH", labelled(
        web, 3, carries=inner(dst=host(web))[:-1]),
        "it says that it is longer than the frame", node="r6")
    drop("inner-length-ipv4", "IP4_LENGTH", labelled(
        four, 2, nh=4, carries=inner4(dst=V2)[:-1]), "likewise", node="r6")
    drop("wrong-chain", "WRONG_CHAIN", labelled(
        web, 3, carries=inner(dst=host(ordered))),
        "another chain's packet", node="r6")
    drop("inner-hop-limit", "INNER_HOP_LIMIT", labelled(
        web, 3, carries=inner(dst=host(web), hlim=1)),
        "the inner packet may not go on", node="r6")
    f.add("mpls-padded", None, "what is behind the inner packet is cut off",
          node="r6", frame=frame(labelled(
              web, 3, carries=inner(dst=host(web)) + b"padding")),
          out=decremented(inner(dst=host(web))))

    # The boundary.
    for type in 0x8847, 0x8848:
        for node in "r1", "r6":
            f.drop("mpls-outside-%x-%s" % (type, node), "OUTSIDE_MPLS", None,
                   "labels from outside", node=node, port="edge",
                   frame=frame(labelled(web, 1), type=type))
    f.drop("mpls-outside-empty", "OUTSIDE_MPLS", None, "an empty frame of labels",
           node="r1", port="edge", frame=frame(b""))
    f.drop("mpls-outside-tagged", "VLAN_TAGS", None, "labels behind a VLAN tag",
           node="r1", port="edge", frame=bytes(
               Ether(**ETHER, type=0x8100) / Dot1Q(vlan=0, type=0x8847) /
               Raw(labelled(web, 1))))
    f.drop("mpls-unproven", "UNPROVEN", None, "without labels, and a chain over "
           "labels requires them", node="r6",
           frame=frame(inner(dst=host(web)), type=0x86dd))
    f.drop("mpls-train", "LABEL_TRAIN", None, "a super-packet of two frames",
           node="r2", frames=2, frame=frame(labelled(web, 1)))
    f.drop("mpls-chain-mtu", "CHAIN_MTU", None, "1301 bytes, 1300 fit", node="r1",
           port="edge", counter=9, frame=frame(bytes(
               IPv6(src=H1, dst=host(direct), hlim=64) / TCP() /
               Raw(bytes(1241))), type=0x86dd))
    return f


def main():
    folder = os.path.join(HERE, "mpls")
    with open(os.path.join(folder, "world.json"), "w") as f:
        json.dump({"comment": "Made by make_mpls.py; do not edit.",
                   "block": "fc00::/48", "lane": LANE, "lanes": LANES,
                   "services": SERVICES,
                   "nodes": [{**n, "local": LOCAL.get(n["name"], []),
                              "routes": [], "label": LABEL[n["name"]],
                              "label_address": ADDRESS[n["name"]]}
                             for n in NODES],
                   "paths": [p.world() for p in PATHS]}, f, indent=1)
        f.write("\n")
    seen = set()
    for f in good(), shapes(), refused():
        for b in f.blocks:
            name = b.split("\n")[0]
            assert name not in seen, name
            seen.add(name)
        f.write("mpls", "make_mpls.py")


if __name__ == "__main__":
    main()
