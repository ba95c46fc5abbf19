package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/waystamp/waystamp/internal/model"
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
	keyParts       = "part/"             // number/part of a generation
	keyPlans       = "plan/"             // node
	keyJoined      = "joined/"           // hash of the secret of a token that was used
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
const recordsVersion = 3

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
	Parts   []partRef         `json:"parts,omitempty"`
	// Of a program before version 3 of the records, which has no parts:
	Paths json.RawMessage   `json:"paths,omitempty"`
	Nodes []json.RawMessage `json:"nodes,omitempty"`
}

// generation is one as it is worked with.
type generation struct {
	generationRecord
	domain *plan.Domain
	parts  []*part // none: it was read from a record without parts
	// from is what the domain was compiled from, if no chain is blocked; nil: it was compiled by another process, or before a restart.
	from *model.Domain
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

// joinedRecord is who has joined with a token, until the token would have expired: the answer may have been lost.
type joinedRecord struct {
	Node    string    `json:"node"`
	Key     string    `json:"key"` // its identity.KeyID
	Expires time.Time `json:"expires"`
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
	note string                 // what operators are told of that commit, beside the state
}

// at is the condition that a record has not changed since.
func (v *view) at(key string) store.Condition {
	return store.Condition{Key: key, Revision: v.written[key]}
}

func readView(ctx context.Context, s store.Store) (*view, error) {
	return new(knownRecords).view(ctx, s)
}

// view is readView, which decodes only what has changed since the last time.
func (c *Controller) view(ctx context.Context) (*view, error) { return c.decoded.view(ctx, c.store) }

// knownRecords remembers the records of nodes as they were decoded: there are three or more of each node, and most are as before. Nobody writes to
// what they hold.
type knownRecords struct {
	mu sync.Mutex
	of map[string]knownRecord // by key
}

type knownRecord struct {
	revision uint64
	record   any // nodeRecord, planRecord or ackRecord
}

func (k *knownRecords) view(ctx context.Context, s store.Store) (*view, error) {
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
	k.mu.Lock()
	defer k.mu.Unlock()
	of := make(map[string]knownRecord, len(snap.Records))
	for key, r := range snap.Records {
		if have, ok := k.of[key]; ok && have.revision == r.Revision && r.Revision != 0 {
			v.put(key, have.record)
			of[key] = have
			continue
		}
		if err := v.read(key, r.Value); err != nil {
			return nil, fmt.Errorf("the record %s is damaged: %w", key, err)
		}
		if record := v.take(key); record != nil {
			of[key] = knownRecord{r.Revision, record}
		}
	}
	k.of = of
	return v, nil
}

// nodeKey is the node and the part that a record of one is of.
func nodeKey(key string) (name, part string) {
	name, part, _ = strings.Cut(strings.TrimPrefix(key, keyNodes), "/")
	return name, part
}

// take is a record that was read and may be remembered; nil: it may not.
func (v *view) take(key string) any {
	if !strings.HasPrefix(key, keyNodes) {
		return nil
	}
	switch name, part := nodeKey(key); part {
	case partID:
		return v.nodes[name]
	case partPlan:
		return v.plans[name]
	case partAck:
		return v.acks[name]
	}
	return nil
}

// put is read of what was taken.
func (v *view) put(key string, record any) {
	name, _ := nodeKey(key)
	switch r := record.(type) {
	case nodeRecord:
		v.nodes[name] = r
	case planRecord:
		v.plans[name] = r
	case ackRecord:
		v.acks[name] = r
	}
}

// viewOf is the view with one node alone, and of the state only whether it is of a backup. That is read first, and once nodes have
// been heard it does not become so again.
func (c *Controller) viewOf(ctx context.Context, name string) (*view, error) {
	v := &view{nodes: map[string]nodeRecord{}, plans: map[string]planRecord{}, acks: map[string]ackRecord{}, held: map[string]heldRecord{}, trusts: map[string]rootsRecord{}, written: map[string]uint64{}}
	state, err := c.store.Snapshot(ctx, keyState)
	if err != nil {
		return nil, err
	}
	if r, ok := state.Records[keyState]; ok {
		var s struct {
			Version  int       `json:"version"`
			Restored time.Time `json:"restored"`
		}
		if err := json.Unmarshal(r.Value, &s); err != nil {
			return nil, fmt.Errorf("the record %s is damaged: %w", keyState, err)
		}
		v.state.Version, v.state.Restored = s.Version, s.Restored
		if err := v.state.checkVersion(); err != nil {
			return nil, err
		}
	}
	snap, err := c.store.Snapshot(ctx, keyNode(name, ""))
	if err != nil {
		return nil, err
	}
	for key, r := range snap.Records {
		v.written[key] = r.Revision
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
	name, part := nodeKey(key)
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

// revocations is how often the machine of this name was revoked.
func (n nodeRecord) revocations() uint32 { return uint32(len(n.RevokedKeys)) }

// revocations are those of all nodes, by name.
func (v *view) revocations() map[string]uint32 {
	out := map[string]uint32{}
	for name, n := range v.nodes {
		if count := n.revocations(); count > 0 {
			out[name] = count
		}
	}
	return out
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
	g := &generation{domain: &plan.Domain{}}
	if err := c.record(ctx, keyGeneration(n), &g.generationRecord); err != nil {
		return nil, err
	}
	if err := c.readParts(ctx, g); err != nil {
		return nil, fmt.Errorf("generation %d: %w", n, err)
	}
	if g.Paths != nil {
		var err error
		if g.domain.Paths, err = plan.DecodePaths(g.Paths); err != nil {
			return nil, fmt.Errorf("generation %d: %w", n, err)
		}
	}
	for _, b := range g.Nodes {
		x, err := plan.DecodeNode(b)
		if err != nil {
			return nil, fmt.Errorf("generation %d: %w", n, err)
		}
		g.domain.Nodes = append(g.domain.Nodes, x)
	}
	for _, x := range g.domain.Nodes {
		g.domain.Block = x.Block
	}
	g.Paths, g.Nodes = nil, nil
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

// errGone means that a record is not there which another one names: it may have been erased
// since that was read.
var errGone = errors.New("it is gone")

// consistent calls f with the control records, again if they have changed when f finds one of
// the others gone.
func (c *Controller) consistent(ctx context.Context, f func(v *view) error) error {
	last := uint64(0)
	for {
		v, err := c.view(ctx)
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
