"""Reads a file of frames with Scapy and prints what is in their headers."""
import json
import sys

from scapy.layers.inet6 import IPv6, IPv6ExtHdrSegmentRouting
from scapy.layers.l2 import Ether
from scapy.packet import Raw
from scapy.utils import rdpcap

out = []
for frame in rdpcap(sys.argv[1]):
    b = bytes(frame)
    ip = Ether(b)[IPv6]
    srh = ip[IPv6ExtHdrSegmentRouting]
    # Not built on anything that could not be read, and the same bytes again.
    assert ip.nh == 43 and bytes(Ether(b)) == b
    inner = srh.payload
    assert isinstance(inner, IPv6), repr(frame)
    # Scapy's TLVs are an older draft's: only where they are is asked.
    at = 14 + 40 + 8 + 16 * len(srh.addresses)
    end = 14 + 40 + 8 + 8 * srh.len
    assert bytes(inner) == b[end:]
    out.append({
        "Source": ip.src, "Destination": ip.dst, "Flow": ip.fl,
        "Length": ip.plen, "HopLimit": ip.hlim, "Next": srh.nh,
        "Left": srh.segleft, "Last": srh.lastentry,
        "Segments": srh.addresses, "TLVs": b[at:end].hex(),
        "InnerSource": inner.src, "InnerDestination": inner.dst,
        "InnerNext": inner.nh})
json.dump(out, sys.stdout)
