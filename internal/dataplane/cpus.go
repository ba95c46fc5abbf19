package dataplane

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/tables"
)

// CPUs is how many lanes a headend on this machine needs: one for each CPU up to
// the highest that is online.
func CPUs() (int, error) {
	const file = "/sys/devices/system/cpu/online"
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("count CPUs: %w", err)
	}
	n, err := parseCPUs(string(b))
	if err != nil {
		return 0, fmt.Errorf("count CPUs: %s: %w", file, err)
	}
	return n, nil
}

// parseCPUs reads a list such as 0-3,5: its last number, and one.
func parseCPUs(list string) (int, error) {
	list = strings.TrimSpace(list)
	last := list[strings.LastIndexAny(list, ",-")+1:]
	n, err := strconv.Atoi(last)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%q is not a list of CPUs", list)
	}
	return n + 1, nil
}

// checkLanes refuses a plan for a machine with fewer CPUs: those without a lane
// would refuse all packets.
func checkLanes(n plan.Node, cpus int) error {
	for _, h := range n.Headends {
		if int(h.Lanes) < cpus {
			return tables.PartError(h.PathID, "the plan has lanes for %d CPUs of node %s, which has %d: say cpus: %d there, and make the plan again",
				h.Lanes, n.Name, cpus, cpus)
		}
	}
	return nil
}
