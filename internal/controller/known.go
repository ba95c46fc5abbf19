package controller

import (
	"crypto/sha256"
	"maps"
	"slices"
	"sync"

	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/plan"
)

// knownPlans remembers of the last few plans of each node that they are good, and their digests, so that what a change
// leaves alone is neither checked nor encoded again. Plans are compared in all, and not by name or revision.
type knownPlans struct {
	sync.Mutex
	of map[string][]*knownPlan // by node, the one that was met last first
}

// knownPlansMax is how many different plans of a node a change can meet: with and without what is prepared, and what drains.
const knownPlansMax = 6

type knownPlan struct {
	node    plan.Node // without a revision
	content string    // digest of its file; "": it was checked and not encoded yet
	sorted  string    // the same of sorted
}

// find returns a plan that is known; nil: it is not.
func (k *knownPlans) find(n plan.Node) *knownPlan {
	n.Revision = 0
	list := k.of[n.Name]
	for i, p := range list {
		if p.node.Equal(n) {
			copy(list[1:i+1], list[:i])
			list[0] = p
			return p
		}
	}
	return nil
}

func (k *knownPlans) add(n plan.Node) *knownPlan {
	n.Revision = 0
	p := &knownPlan{node: n}
	if k.of == nil {
		k.of = map[string][]*knownPlan{}
	}
	list := k.of[n.Name]
	k.of[n.Name] = slices.Insert(list[:min(len(list), knownPlansMax-1)], 0, p)
	return p
}

// checked tells whether a plan was found good before.
func (k *knownPlans) checked(n plan.Node) bool {
	k.Lock()
	defer k.Unlock()
	return k.find(n) != nil
}

// check finds out whether all nodes can hold what is live, and remembers the plans of those that can.
func (k *knownPlans) check(l plan.Live) error {
	nodes, err := l.Nodes()
	if err != nil {
		return err
	}
	k.Lock()
	defer k.Unlock()
	for _, n := range nodes {
		if k.find(n) == nil {
			k.add(n)
		}
	}
	return nil
}

// digest is that of what encode makes of the plan without a revision, which is remembered at one of its fields.
func (k *knownPlans) digest(n plan.Node, encode func(plan.Node) ([]byte, error), field func(*knownPlan) *string) (string, error) {
	k.Lock()
	defer k.Unlock()
	p := k.find(n)
	if p != nil && *field(p) != "" {
		return *field(p), nil
	}
	n.Revision = 0
	b, err := encode(n) // it checks the plan, too
	if err != nil {
		return "", err
	}
	if p == nil {
		p = k.add(n)
	}
	*field(p) = digest(b)
	return *field(p), nil
}

// forgetBut leaves only what is known of these plans, so that no secret stays in memory that all others have erased. While a change is
// prepared, other plans of the same nodes stay, too.
func (k *knownPlans) forgetBut(nodes []plan.Node, prepared bool) {
	k.Lock()
	defer k.Unlock()
	left := make(map[string][]*knownPlan, len(nodes))
	for i := range nodes {
		p := k.find(nodes[i])
		switch {
		case prepared:
			left[nodes[i].Name] = k.of[nodes[i].Name]
		case p != nil:
			left[nodes[i].Name] = []*knownPlan{p}
		}
	}
	k.of = left
}

// clear leaves nothing.
func (k *knownPlans) clear() {
	k.Lock()
	defer k.Unlock()
	k.of = nil
}

// parsed remembers the last domain files: a request is parsed when it comes, compared with the one before, and parsed
// again when it is begun. Of another file, what differs is read.
var parsed struct {
	sync.Mutex
	files []parsedFile // the one that was met last first
}

const parsedMax = 2

type parsedFile struct {
	digest [sha256.Size]byte // of its record
	name   string
	rules  map[string]string
	m      manifest.Manifest
	read   *manifest.Parsed
}

// parse checks a file, and puts the rules into it that the operator's side has read. The list of chains is the caller's; what is in it, and all
// others, nobody may write to.
func parse(f fileRecord) (manifest.Manifest, error) {
	sum := sha256.Sum256(encode(f))
	parsed.Lock()
	defer parsed.Unlock()
	for _, p := range parsed.files {
		if p.digest == sum {
			return ownChains(p.m), nil
		}
	}
	p := parsedFile{digest: sum, name: f.Name, rules: f.Rules}
	var last parsedFile
	if i := slices.IndexFunc(parsed.files, func(p parsedFile) bool { return p.name == f.Name && maps.Equal(p.rules, f.Rules) }); i >= 0 {
		last = parsed.files[i]
	}
	var err error
	var again bool
	if p.m, p.read, again, err = manifest.ParseAfter(last.read, f.Name, f.Source); err != nil {
		return p.m, err
	}
	if again { // the lines of all but the chains are the same
		p.m.Domain.Nodes, p.m.Domain.Functions = last.m.Domain.Nodes, last.m.Domain.Functions
	} else if err := putRules(&p.m, f); err != nil {
		return p.m, err
	}
	parsed.files = slices.Insert(parsed.files[:min(len(parsed.files), parsedMax-1)], 0, p)
	return ownChains(p.m), nil
}

func ownChains(m manifest.Manifest) manifest.Manifest {
	m.Domain.Chains = slices.Clone(m.Domain.Chains)
	return m
}
