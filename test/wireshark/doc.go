// Package wireshark tests the dissector in tools/wireshark with tshark: on the
// packets of test/packets, which Scapy made, on broken ones, and on what
// docs/how-to/wireshark.md shows. It needs no root.
package wireshark
