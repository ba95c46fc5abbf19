package meter

import (
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
)

// An EtherType for experiments (IEEE 802).
const unusedProtocol = 0x88b5

// A kernel without tcx has filters of clsact instead; here one is forced.
func TestSinkWithoutTCXCountsAndGoes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ns, err := host.Anonymous()
	must(err)
	defer ns.Close()
	n, err := host.Open(ns)
	must(err)
	defer n.Close()
	must(n.AddVeth(host.Veth{Name: "from", PeerName: "to"}))
	must(n.SetUp("from"))
	must(n.SetUp("to"))
	to, err := n.Device("to")
	must(err)

	withoutTCX = true
	t.Cleanup(func() { withoutTCX = false })
	var tap *Tap
	must(ns.Do(func() error {
		var err error
		tap, err = NewSink(to.Index, TC)
		return err
	}))
	defer tap.Close()
	if there, err := n.Filters(to.Index, false); err != nil || len(there) != 1 {
		t.Errorf("filters %v, %v; want one", there, err)
	}
	frames, err := host.OpenFrames(ns, "from", unusedProtocol)
	must(err)
	defer frames.Close()
	frame := make([]byte, 60)
	binary.BigEndian.PutUint16(frame[12:], unusedProtocol)
	const sent = 100
	for range sent {
		must(frames.Send(frame))
	}
	end := time.Now().Add(await.Limit(5 * time.Second))
	for {
		got, _, err := tap.Seen()
		must(err)
		if got >= sent {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the sink counted %d frames of %d", got, sent)
		}
		time.Sleep(time.Millisecond)
	}
	must(tap.link.Close())
	tap.link = nil
	if left, err := n.Filters(to.Index, false); err != nil || len(left) > 0 {
		t.Errorf("filters %v are left, %v", left, err)
	}
}
