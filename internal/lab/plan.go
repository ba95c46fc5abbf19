package lab

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
)

// compile makes a plan with fresh secrets.
func compile(d model.Domain) (*plan.Domain, error) {
	d, err := OnThisMachine(d)
	if err != nil {
		return nil, err
	}
	return plan.Compile(d, plan.NewKeyring(rand.Reader, nil))
}

// OnThisMachine is a domain whose nodes are all on this machine, and have its
// CPUs.
func OnThisMachine(d model.Domain) (model.Domain, error) {
	cpus, err := dataplane.CPUs()
	if err != nil {
		return d, err
	}
	d.Nodes = slices.Clone(d.Nodes)
	for i := range d.Nodes {
		d.Nodes[i].CPUs = cpus
	}
	return d, nil
}

// writePlans writes what each node gets, and what only the lab keeps.
func (l *Lab) writePlans(ctx context.Context, d *plan.Domain) error {
	b, err := await.Do(ctx, func() ([]byte, error) { return plan.EncodePaths(d.Paths) })
	if err == nil {
		err = replaceFile(l.PathsPath(), b)
	}
	if err != nil {
		return fmt.Errorf("write the paths of lab %s: %w", l.Prefix(), err)
	}
	for _, n := range d.Nodes {
		if err := l.writeNodePlan(ctx, n.Name, n); err != nil {
			return err
		}
	}
	return nil
}

// WriteNodePlan replaces a node's plan file in one step; its agent then follows
// the new one.
func (l *Lab) WriteNodePlan(node string, n plan.Node) error {
	return l.writeNodePlan(context.Background(), node, n)
}

func (l *Lab) writeNodePlan(ctx context.Context, node string, n plan.Node) error {
	if l.IsControlled() {
		return fmt.Errorf("write the plan of %s: %w", node, errControlled)
	}
	b, err := await.Do(ctx, func() ([]byte, error) { return plan.EncodeNode(n) })
	if err == nil {
		err = replaceFile(l.NodePlanPath(node), b)
	}
	if err != nil {
		return fmt.Errorf("write the plan of %s: %w", node, err)
	}
	return nil
}

// NodePlan reads the plan file of a node.
func (l *Lab) NodePlan(node string) (plan.Node, error) {
	if _, err := l.Member(node); err != nil {
		return plan.Node{}, err
	}
	if l.IsControlled() {
		return plan.Node{}, fmt.Errorf("read the plan of %s: %w", node, errControlled)
	}
	b, err := planfile.Read(l.NodePlanPath(node))
	if err != nil {
		return plan.Node{}, fmt.Errorf("read the plan of %s: %w", node, err)
	}
	return plan.DecodeNode(b)
}

// Paths reads all paths with their secrets, as they were when the lab was built.
func (l *Lab) Paths() ([]plan.Path, error) {
	if l.IsControlled() {
		return nil, fmt.Errorf("read the paths of lab %s: %w", l.Prefix(), errControlled)
	}
	b, err := planfile.Read(l.PathsPath())
	if err != nil {
		return nil, fmt.Errorf("read the paths of lab %s: %w", l.Prefix(), err)
	}
	return plan.DecodePaths(b)
}
