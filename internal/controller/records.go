package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/store"
)

// The keys of the store. What is small is below control/, so that a decision reads one
// snapshot of it; what is large, and never changes under its key, has keys of its own.
const (
	keyCA          = "ca"
	keyControl     = "control/"
	keyState       = "control/state"
	keyWanted      = "control/wanted"
	keyNodes       = "control/node/"     // NAME/{id,plan,ack,held,roots}
	keyTokens      = "control/token/"    // hash of the secret
	keyOperators   = "control/operator/" // NAME
	keyFiles       = "file/"             // serial
	keyGenerations = "generation/"       // number
	keyPlans       = "plan/"             // node
	keyRestoring   = "restoring"         // while a restore is not through
)

func keyNode(name, part string) string { return keyNodes + name + "/" + part }
func keyFile(serial uint64) string     { return fmt.Sprintf("%s%016x", keyFiles, serial) }
func keyGeneration(n uint64) string    { return fmt.Sprintf("%s%016x", keyGenerations, n) }

// The parts of a node below keyNodes.
const (
	partID   = "id"
	partPlan = "plan"
	partAck  = "ack"
	partHeld = "held" // only after a restore

	partRoots = "roots" // only while the CA changes
)

// caRecord is the controller's own key.
type caRecord struct {
	Root  []byte    `json:"root"` // DER; what signs
	Key   []byte    `json:"key"`
	Next  *caKey    `json:"next,omitempty"` // what will sign; nil: none is to come
	Old   []byte    `json:"old,omitempty"`  // the root before, which is still trusted; its key is gone
	Since time.Time `json:"since,omitzero"` // of the last change
}

// caKey is a root with its key.
type caKey struct {
	Root []byte `json:"root"`
	Key  []byte `json:"key"`
}

// rootsRecord is which roots a node trusts, as long as they change.
type rootsRecord struct {
	Pins []string `json:"pins"` // the first is that of its certificate
}

// wantedRecord is what operators have asked for. Serial grows with each request.
type wantedRecord struct {
	Serial  uint64            `json:"serial"`
	File    uint64            `json:"file"` // the serial of keyFile; 0: no file was applied yet
	Deleted []string          `json:"deleted,omitempty"`
	Rotate  map[string]uint64 `json:"rotate,omitempty"` // by chain: the serial of the last request
	// Rotated is when fresh secrets of all chains were asked for last; zero: nobody knows.
	Rotated time.Time `json:"rotated,omitzero"`
	// Clock is until when the chains' own times (rotate-every) have been looked at. A program that does not know it
	// loses it, and then all such chains get fresh secrets once more.
	Clock time.Time `json:"clock,omitzero"`
}

// fileRecord is a domain file.
type fileRecord struct {
	Name   string            `json:"name"`
	Source []byte            `json:"source"`
	Rules  map[string]string `json:"rules,omitempty"` // by function
}

// recordsVersion grows with each change of the records that a program without it would undo: it writes back
// only the fields that it knows.
const recordsVersion = 2

// errLater means that the records are of a later program. It does not lead over them, nor answer calls.
var errLater = errors.New("the records are of a later version")

// checkVersion is an error if a later program has written the state.
func (s stateRecord) checkVersion() error {
	if s.Version > recordsVersion {
		return fmt.Errorf("%w: %d, and this program writes %d: it would lose what it does not know; run the later program, or one newer than that", errLater, s.Version, recordsVersion)
	}
	return nil
}

// stateRecord is how far the domain is. Each change of it is one commit, before anything is
// sent to a node.
type stateRecord struct {
	Version int `json:"version"` // recordsVersion of the program that wrote it; 0: it is older than that

	Revision   uint64 `json:"revision"`   // the last that a plan got
	Generation uint64 `json:"generation"` // the last number
	Serial     uint64 `json:"serial"`     // of the request that was begun last

	Now  uint64      `json:"now"`            // whose epochs headends send; 0: none
	Next uint64      `json:"next,omitempty"` // being prepared; 0: none
	Old  []oldRecord `json:"old,omitempty"`  // draining, the oldest first

	Step    step              `json:"step,omitempty"`
	Since   time.Time         `json:"since,omitzero"`    // of the step
	Waiting map[string]uint64 `json:"waiting,omitempty"` // by node: the plan's revision that ends the step

	// Late are nodes that have not ended a turn that another change went over.
	Late map[string]lateRecord `json:"late,omitempty"`

	Revoked []string        `json:"revoked,omitempty"` // nodes without which Now was made
	Erasing []erasingRecord `json:"erasing,omitempty"`

	// Restored is when the backup was made that the records are of; zero: they are of none, or nodes
	// have said what they hold since.
	Restored time.Time `json:"restored,omitzero"`

	// Problem is why the request in wanted of that serial is not begun.
	Problem       string `json:"problem,omitempty"`
	ProblemSerial uint64 `json:"problem-serial,omitempty"`
}

// step is what nodes have to acknowledge before the next commit.
type step string

const (
	stepNone    step = ""
	stepPrepare step = "prepare" // functions and egresses know the new epochs
	stepTurn    step = "turn"    // headends send them
)

// oldRecord is a generation whose packets may be under way.
type oldRecord struct {
	Generation uint64    `json:"generation"`
	Until      time.Time `json:"until,omitzero"` // zero: not all headends have turned yet
	// Waiting is for which nodes' turn it waits, with the plan's revision; none: for those of the step.
	Waiting map[string]uint64 `json:"waiting,omitempty"`
}

// lateRecord is what a node has not put in force yet, and all others go on without.
type lateRecord struct {
	Revision uint64    `json:"revision"` // the plan's that ends it
	Since    time.Time `json:"since"`    // of the first such turn
}

// erasingRecord is epochs that some nodes may still hold.
type erasingRecord struct {
	Epochs []pathEpoch       `json:"epochs"`
	Nodes  map[string]uint64 `json:"nodes"`            // by name: the plan's revision that is without them
	Unsent bool              `json:"unsent,omitempty"` // no headend ever had them: their change was given up
}

type pathEpoch struct {
	Path  uint32 `json:"path"`
	Epoch uint8  `json:"epoch"`
}

// generationRecord is one compilation of the domain. It holds all secrets, never changes, and is
// deleted when its packets have drained.
type generationRecord struct {
	Serial  uint64            `json:"serial"`
	File    uint64            `json:"file"`
	Deleted []string          `json:"deleted,omitempty"`
	Rotated map[string]uint64 `json:"rotated,omitempty"`
	Blocked map[string]string `json:"blocked,omitempty"` // by chain: why
	Drain   time.Duration     `json:"drain"`             // how long its packets may be under way
	Paths   json.RawMessage   `json:"paths"`
	Nodes   []json.RawMessage `json:"nodes"`
}

// generation is one as it is worked with.
type generation struct {
	generationRecord
	domain *plan.Domain
}

// nodeRecord is who a node is.
type nodeRecord struct {
	Key         string    `json:"key,omitempty"` // its identity.KeyID; "": it has not joined
	Joined      time.Time `json:"joined,omitzero"`
	Revoked     bool      `json:"revoked,omitempty"`
	RevokedKeys []string  `json:"revoked-keys,omitempty"`
}

// planRecord is what a node shall hold; the plan itself is under keyPlans.
type planRecord struct {
	Revision uint64 `json:"revision"`
	Digest   string `json:"digest"`  // of the plan with its revision
	Content  string `json:"content"` // digest of the plan without
}

// ackRecord is what a node's kernel holds.
type ackRecord struct {
	Revision uint64    `json:"revision"`
	Digest   string    `json:"digest"`
	Refused  uint64    `json:"refused,omitempty"` // the revision of a later plan that is not in force
	Error    string    `json:"error,omitempty"`   // why
	Problems []string  `json:"problems,omitempty"`
	Warnings []string  `json:"warnings,omitempty"`
	At       time.Time `json:"at"`
}

// heldRecord is what a node has on its disk that these records know nothing of.
type heldRecord struct {
	Revision uint64      `json:"revision"`
	Epochs   []pathEpoch `json:"epochs,omitempty"` // the latest of each path
}

// tokenRecord is a token that nobody has used yet.
type tokenRecord struct {
	Node      string    `json:"node"`
	Expires   time.Time `json:"expires"`
	Reinstate bool      `json:"reinstate,omitempty"`
}

// operatorRecord is who may call Admin over TLS.
type operatorRecord struct {
	Key     string    `json:"key"` // its identity.KeyID
	Role    string    `json:"role"`
	Expires time.Time `json:"expires"` // his certificate
}

// view is the control records at one revision.
type view struct {
	revision uint64 // of the store

	state  stateRecord
	wanted wantedRecord
	nodes  map[string]nodeRecord
	plans  map[string]planRecord
	acks   map[string]ackRecord
	held   map[string]heldRecord
	trusts map[string]rootsRecord
	tokens map[string]tokenRecord // by hash

	operators map[string]operatorRecord

	written map[string]uint64 // by key, for conditions

	made map[uint64]*generation // by number: those of a commit that is not done yet
}

// at is the condition that a record has not changed since.
func (v *view) at(key string) store.Condition {
	return store.Condition{Key: key, Revision: v.written[key]}
}

func readView(ctx context.Context, s store.Store) (*view, error) {
	snap, err := s.Snapshot(ctx, keyControl)
	if err != nil {
		return nil, err
	}
	v := &view{
		revision: snap.Revision,
		nodes:    map[string]nodeRecord{}, plans: map[string]planRecord{}, acks: map[string]ackRecord{}, held: map[string]heldRecord{}, trusts: map[string]rootsRecord{}, tokens: map[string]tokenRecord{}, operators: map[string]operatorRecord{},
		written: map[string]uint64{}, made: map[uint64]*generation{},
	}
	for key, r := range snap.Records {
		v.written[key] = r.Revision
	}
	// First, since a later program may have keys of its own.
	if r, ok := snap.Records[keyState]; ok {
		var version struct {
			Version int `json:"version"`
		}
		if err := json.Unmarshal(r.Value, &version); err != nil {
			return nil, fmt.Errorf("the record %s is damaged: %w", keyState, err)
		}
		if err := (stateRecord{Version: version.Version}).checkVersion(); err != nil {
			return nil, err
		}
	}
	for key, r := range snap.Records {
		if err := v.read(key, r.Value); err != nil {
			return nil, fmt.Errorf("the record %s is damaged: %w", key, err)
		}
	}
	return v, nil
}

func (v *view) read(key string, value []byte) error {
	switch {
	case key == keyState:
		return json.Unmarshal(value, &v.state)
	case key == keyWanted:
		return json.Unmarshal(value, &v.wanted)
	case strings.HasPrefix(key, keyTokens):
		return into(v.tokens, strings.TrimPrefix(key, keyTokens), value)
	case strings.HasPrefix(key, keyOperators):
		return into(v.operators, strings.TrimPrefix(key, keyOperators), value)
	}
	name, part, _ := strings.Cut(strings.TrimPrefix(key, keyNodes), "/")
	switch part {
	case partID:
		return into(v.nodes, name, value)
	case partPlan:
		return into(v.plans, name, value)
	case partAck:
		return into(v.acks, name, value)
	case partHeld:
		return into(v.held, name, value)
	case partRoots:
		return into(v.trusts, name, value)
	}
	return fmt.Errorf("this program does not know it")
}

func into[T any](m map[string]T, key string, value []byte) error {
	var x T
	if err := json.Unmarshal(value, &x); err != nil {
		return err
	}
	m[key] = x
	return nil
}

// revoked are the names of nodes that were thrown out, sorted.
func (v *view) revoked() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(v.nodes)) {
		if v.nodes[name].Revoked {
			names = append(names, name)
		}
	}
	return names
}

// holds tells whether a node's kernel has a plan of at least this revision.
func (v *view) holds(name string, revision uint64) bool { return v.acks[name].Revision >= revision }

// refuses tells whether a node could not put the plan in force that it shall hold.
func (v *view) refuses(name string) bool {
	a := v.acks[name]
	return a.Refused > a.Revision && a.Refused == v.plans[name].Revision
}

// waitingFor are the nodes that have not ended the step.
func (v *view) waitingFor() []string { return v.without(v.state.Waiting) }

// without are the nodes that do not hold their plan of a revision yet, or a later one. Nodes that
// were revoked, or have no plan, are out.
func (v *view) without(revisions map[string]uint64) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(revisions)) {
		if _, in := v.plans[name]; in && !v.holds(name, revisions[name]) && !v.nodes[name].Revoked {
			names = append(names, name)
		}
	}
	return names
}

// late are the nodes that have not ended a turn that another change went over.
func (v *view) late() []string {
	revisions := map[string]uint64{}
	for name, l := range v.state.Late {
		revisions[name] = l.Revision
	}
	return v.without(revisions)
}

// leave notes that what comes next goes on without these nodes, which end a turn with plans of these
// revisions; and forgets of whom that is not true any more.
func (v *view) leave(revisions map[string]uint64, since time.Time) {
	late := map[string]lateRecord{}
	for _, name := range v.late() {
		late[name] = v.state.Late[name]
	}
	for name, revision := range revisions {
		l, ok := late[name]
		if !ok {
			l.Since = since
		}
		l.Revision = max(l.Revision, revision)
		late[name] = l
	}
	v.state.Late = late
}

// encode is JSON of one of the records above, which can always be encoded.
func encode(record any) []byte {
	b, err := json.Marshal(record)
	if err != nil {
		panic(fmt.Sprintf("encode a record of the controller: %v", err))
	}
	return b
}

// generation reads one, or takes it of those that the view's commit is to make.
func (c *Controller) generation(ctx context.Context, v *view, n uint64) (*generation, error) {
	if n == 0 {
		return &generation{domain: &plan.Domain{}}, nil
	}
	if g, ok := v.made[n]; ok {
		return g, nil
	}
	c.cache.Lock()
	defer c.cache.Unlock()
	if g, ok := c.cache.generations[n]; ok {
		return g, nil
	}
	var r generationRecord
	if err := c.record(ctx, keyGeneration(n), &r); err != nil {
		return nil, err
	}
	g := &generation{generationRecord: r, domain: &plan.Domain{}}
	var err error
	if g.domain.Paths, err = plan.DecodePaths(r.Paths); err != nil {
		return nil, fmt.Errorf("generation %d: %w", n, err)
	}
	for _, b := range r.Nodes {
		x, err := plan.DecodeNode(b)
		if err != nil {
			return nil, fmt.Errorf("generation %d: %w", n, err)
		}
		g.domain.Nodes = append(g.domain.Nodes, x)
		g.domain.Block = x.Block
	}
	if c.leads() != nil { // else nobody would forget it
		c.cache.generations[n] = g
	}
	return g, nil
}

// forget takes generations out of memory that are not live any more.
func (c *Controller) forget(live ...uint64) {
	c.cache.Lock()
	defer c.cache.Unlock()
	maps.DeleteFunc(c.cache.generations, func(n uint64, _ *generation) bool { return !slices.Contains(live, n) })
}

func (g *generation) encode() ([]byte, error) {
	r := g.generationRecord
	var err error
	if r.Paths, err = plan.EncodePaths(g.domain.Paths); err != nil {
		return nil, err
	}
	r.Nodes = nil
	for _, n := range g.domain.Nodes {
		b, err := plan.EncodeNode(n)
		if err != nil {
			return nil, err
		}
		r.Nodes = append(r.Nodes, b)
	}
	return json.Marshal(r)
}

// errGone means that a record is not there which another one names: it may have been erased
// since that was read.
var errGone = errors.New("it is gone")

// consistent calls f with the control records, again if they have changed when f finds one of
// the others gone.
func consistent(ctx context.Context, s store.Store, f func(v *view) error) error {
	last := uint64(0)
	for {
		v, err := readView(ctx, s)
		if err != nil {
			return failed(err)
		}
		err = f(v)
		if now := v.written[keyState] + v.written[keyWanted]; errors.Is(err, errGone) && now != last {
			last = now // both only grow
			continue
		}
		return err
	}
}

// record reads one record that has to be there.
func (c *Controller) record(ctx context.Context, key string, into any) error {
	snap, err := c.store.Snapshot(ctx, key)
	if err != nil {
		return err
	}
	r, ok := snap.Records[key]
	if !ok {
		return fmt.Errorf("the record %s: %w", key, errGone)
	}
	if err := json.Unmarshal(r.Value, into); err != nil {
		return fmt.Errorf("the record %s is damaged: %w", key, err)
	}
	return nil
}
