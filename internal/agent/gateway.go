package agent

import (
	"fmt"

	"github.com/waystamp/waystamp/internal/plan"
)

// refuseGateway refuses a plan with a gateway: the data path has none yet.
func refuseGateway(n plan.Node) error {
	g := n.Gateway()
	if g == nil {
		return nil
	}
	return fmt.Errorf("this program runs no gateways yet, and service %s has its gateway on node %s; take services out of the domain file", g.Services[0].Name, n.Name)
}
