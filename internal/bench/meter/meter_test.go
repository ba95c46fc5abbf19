package meter

import "testing"

func TestPacketsOfSeveralCPUsAreOfOneTime(t *testing.T) {
	one := seen{Packets: 1000, FirstNs: 5000, First: 64, LastNs: 5000 + 640*100, Last: 704}
	for name, c := range map[string]struct {
		cpus []seen
		n    uint64
		each float64
	}{
		"one CPU":     {[]seen{{}, one}, 1000, 100},
		"two at once": {[]seen{one, one}, 2000, 50},
		// 1280 packets between the first of one and the last of the other.
		"one after the other": {[]seen{one, {Packets: 1000, FirstNs: 69000, First: 64, LastNs: 133000, Last: 704}}, 2000, 100},
		"too few to say":      {[]seen{{Packets: 70, FirstNs: 1, First: 64, LastNs: 1, Last: 64}}, 70, 0},
		"a few strays":        {[]seen{one, {Packets: 3}}, 1003, 100},
	} {
		if n, each := together(c.cpus); n != c.n || each != c.each {
			t.Errorf("%s: %d packets, %v ns each; want %d, %v", name, n, each, c.n, c.each)
		}
	}
}
