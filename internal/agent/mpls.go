package agent

import (
	"errors"

	"github.com/waystamp/waystamp/internal/plan"
)

// withoutLabels refuses plans of domains with labels, for which there is no data path: neither
// would their chains carry anything, nor would edges refuse labels.
func withoutLabels(n plan.Node) error {
	if n.MPLS != nil {
		return errors.New("the domain has chains of type sr-mpls or labels for them (mpls), which this version plans and does not carry; use type srv6, and take mpls out of the domain's file")
	}
	return nil
}
