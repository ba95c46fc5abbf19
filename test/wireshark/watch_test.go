package wireshark

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/waystamp/waystamp/internal/pcapng"
	"github.com/waystamp/waystamp/test/packets"
)

// What waystamp watch --pcap writes tshark reads: interfaces, times, lengths, comments, and
// the packets themselves.
func TestCapturesOfRefusedPacketsAreRead(t *testing.T) {
	all, err := packets.All()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "refused.pcapng")
	var file bytes.Buffer
	w, err := pcapng.NewWriter(&file, "waystamp")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	at := time.Date(2026, 1, 2, 3, 4, 5, 678900001, time.UTC)
	for i, p := range all[:20] {
		port := fmt.Sprintf("r%d/eth0", i%3)
		comment := fmt.Sprintf("refused: %s\nsecond line", p.Name)
		cut := p.Frame[:min(len(p.Frame), 60+i)]
		if err := w.Write(pcapng.Packet{Time: at.Add(time.Duration(i)), Interface: port, Bytes: cut, Len: len(p.Frame), Dropped: uint64(i), Comment: comment}); err != nil {
			t.Fatal(err)
		}
		want = append(want, strings.Join([]string{
			port, fmt.Sprintf("%d.%09d", at.Unix(), at.Nanosecond()+i), fmt.Sprint(len(p.Frame)), fmt.Sprint(len(cut)),
			strings.ReplaceAll(comment, "\n", `\n`),
		}, "|"))
	}
	if err := os.WriteFile(name, file.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	got := tshark(t, "-r", name, "-T", "fields", "-E", "separator=|", "-e", "frame.interface_name", "-e", "frame.time_epoch",
		"-e", "frame.len", "-e", "frame.cap_len", "-e", "frame.comment")
	if diff := cmp.Diff(strings.Join(want, "\n"), strings.TrimSpace(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
