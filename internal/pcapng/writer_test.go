package pcapng

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

// Byte by byte, as the draft has it. test/wireshark reads such files by tshark.
func TestBlocksAreTheDrafts(t *testing.T) {
	var out bytes.Buffer
	w, err := NewWriter(&out, "x")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the interface is described once
		if err := w.Write(Packet{Time: time.Unix(1, 2), Interface: "r1/a", Bytes: []byte{0xaa}, Len: 60, Dropped: 3, Comment: "no"}); err != nil {
			t.Fatal(err)
		}
	}
	packet := "06000000" + "3c000000" + "00000000" + "00000000" + "02ca9a3b" + "01000000" + "3c000000" + "aa000000" +
		"01000200" + "6e6f0000" + "04000800" + "0300000000000000" + "00000000" + "3c000000"
	want := strings.Join([]string{
		"0a0d0d0a", "28000000", "4d3c2b1a", "01000000", "ffffffffffffffff", "04000100", "78000000", "00000000", "28000000",
		"01000000", "28000000", "0100000000000000", "02000400", "72312f61", "09000100", "09000000", "00000000", "28000000",
		packet, packet,
	}, "")
	if got := hex.EncodeToString(out.Bytes()); got != want {
		t.Errorf("wrote\n%s, want\n%s", got, want)
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestErrorsOfTheFileAreTold(t *testing.T) {
	if _, err := NewWriter(full{}, "x"); err == nil {
		t.Error("got no error")
	}
}
