"""What Scapy reads of the SYNs in a file: their MSS options, and whether the
checksum is the one that it computes."""
import json
import sys

from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.utils import rdpcap

out = []
for frame in rdpcap(sys.argv[1]):
    b = bytes(frame)
    ip, outer = b[14:], False
    # Behind an SRH the bytes are looked at for themselves.
    if IPv6 in Ether(b) and ip[6] == 43:
        ip, outer = ip[40 + 8 * (ip[41] + 1):], True
    ip = {4: IP, 6: IPv6}.get(ip[0] >> 4, IP)(ip)
    if TCP not in ip or not ip[TCP].flags.S:
        continue
    said = ip[TCP].chksum
    del ip[TCP].chksum
    out.append({
        "Outer": outer, "Answer": int(ip[TCP].flags.A),
        "MSS": [v for k, v in ip[TCP].options if k == "MSS"],
        "Right": int(type(ip)(bytes(ip))[TCP].chksum == said)})
json.dump(out, sys.stdout)
