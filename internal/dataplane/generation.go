package dataplane

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/tables"
)

// observed are the maps that only report, and connections, whose keys mean the same in
// any plan: a new generation takes them over, where they fit, so that counters, events
// and connections go on.
var observed = []tables.Map{tables.MapConns, tables.MapConnsNew, tables.MapConnsAdded, tables.MapConnsGone, tables.MapStats, tables.MapProxyStats, tables.MapRefusals, tables.MapErrors, tables.MapEvents, tables.MapTraces, tables.MapTracing, tables.MapTraced}

// identity describes the contents of a generation. Two with the same objects have the same
// layout of maps. Two equal generations differ only in the contents of their maps, the sizes,
// and the key of their caches.
type identity struct {
	objects string
	config  string
}

func identityOf(cfg abi.Config) identity {
	cfg.FingerprintKey = [2]uint64{} // random for every generation
	return identity{
		objects: objectsDigest(),
		config:  hex.EncodeToString(sha256Of(fmt.Sprintf("%+v", cfg))[:4]),
	}
}

// objectsDigest is that of all objects.
var objectsDigest = sync.OnceValue(func() string {
	obj := sha256.New()
	for _, o := range object.All {
		sum := sha256.Sum256(*o.ELF)
		obj.Write(sum[:])
	}
	return hex.EncodeToString(obj.Sum(nil)[:8])
})

func sha256Of(s string) []byte {
	sum := sha256.Sum256([]byte(s))
	return sum[:]
}

// generation is one set of maps and the programs that use them.
type generation struct {
	seq      int
	identity identity
	dir      string
	limits   tables.Limits
	maps     map[tables.Map]*ebpf.Map
	programs map[string]*ebpf.Program // the programs that plans have needed; see need

	inner     map[string]*ebpf.Map // the maps in outer maps, by innerName; see openInner
	constants map[string]*ebpf.Map // that the programs were loaded with
}

func (g *generation) close() error {
	if g == nil {
		return nil
	}
	var errs []error
	for _, m := range g.maps {
		errs = append(errs, m.Close())
	}
	for _, m := range g.inner {
		errs = append(errs, m.Close())
	}
	for _, p := range g.programs {
		errs = append(errs, p.Close())
	}
	for _, m := range g.constants {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

func generationName(seq int, id identity) string {
	return fmt.Sprintf("gen-%d-%s-%s", seq, id.objects, id.config)
}

func parseGenerationName(name string) (seq int, id identity, ok bool) {
	f := strings.Split(name, "-")
	if len(f) != 4 || f[0] != "gen" {
		return 0, identity{}, false
	}
	seq, err := strconv.Atoi(f[1])
	if err != nil || seq < 1 {
		return 0, identity{}, false
	}
	return seq, identity{f[2], f[3]}, true
}

// generationDirs are the names of all generations, the newest first, and of the unfinished ones.
func generationDirs(dir string) (whole, unfinished []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read the instance's pins: %w", err)
	}
	for _, e := range entries {
		if _, _, ok := parseGenerationName(e.Name()); ok {
			whole = append(whole, e.Name())
		} else if strings.HasPrefix(e.Name(), "new-") {
			unfinished = append(unfinished, e.Name())
		}
	}
	slices.SortFunc(whole, func(a, b string) int {
		x, _, _ := parseGenerationName(a)
		y, _, _ := parseGenerationName(b)
		return y - x
	})
	return whole, unfinished, nil
}

// openGeneration opens the newest generation, if it is complete and has the objects of this
// binary; the next Apply replaces any other. It removes unfinished generations.
func openGeneration(dir string, log *slog.Logger) (*generation, error) {
	whole, unfinished, err := generationDirs(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range unfinished {
		if err := removeTree(filepath.Join(dir, name)); err != nil {
			return nil, err
		}
	}
	if len(whole) == 0 {
		return nil, nil
	}
	seq, id, _ := parseGenerationName(whole[0])
	if ours := identityOf(abi.Config{}); id.objects != ours.objects {
		log.Info("the pinned programs are of another version and will be replaced", "pins", whole[0])
		return nil, nil
	}
	g := &generation{seq: seq, identity: id, dir: filepath.Join(dir, whole[0])}
	if err := g.load(); err != nil {
		log.Warn("the pinned programs are not whole and will be replaced", "pins", whole[0], "err", err)
		return nil, g.close()
	}
	return g, nil
}

// load opens all pins of a generation of this binary's objects.
func (g *generation) load() error {
	g.maps = map[tables.Map]*ebpf.Map{}
	g.programs = map[string]*ebpf.Program{}
	g.constants = map[string]*ebpf.Map{}
	specs, err := object.LoadMaps()
	if err != nil {
		return err
	}
	for name, ms := range specs {
		if internalMap(name) {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(g.dir, name), nil)
		if err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
		g.maps[tables.Map(name)] = m
		size := m.MaxEntries()
		ms.MaxEntries = sizeOf(tables.Map(name), ms, tables.Limits{Lines: size, Headends: size, Stats: size, Hops: size, Egresses: size, Places: size, Buckets: size / abi.Ways, Slots: size})
		if tables.Map(name) == tables.MapBuckets {
			ms.MaxEntries = size
		}
		if err := ms.Compatible(m); err != nil {
			return fmt.Errorf("map %s: %w", name, err)
		}
	}
	for _, o := range object.All {
		p, err := ebpf.LoadPinnedProgram(filepath.Join(g.dir, o.Program), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue // no plan has needed it
		}
		if err != nil {
			return fmt.Errorf("program %s: %w", o.Program, err)
		}
		g.programs[o.Program] = p
		if g.constants[o.Program], err = ebpf.LoadPinnedMap(filepath.Join(g.dir, constantsPin(o.Program)), nil); err != nil {
			return fmt.Errorf("constants of program %s: %w", o.Program, err)
		}
	}
	if len(g.programs) == 0 {
		return errors.New("none of its programs is there")
	}
	steer, err := g.openInner(tables.MapMatch, uint32(abi.MatchUseSteer))
	if err != nil {
		return err
	}
	g.limits = tables.Limits{
		Lines:    steer.MaxEntries(),
		Headends: g.maps[tables.MapHeadends].MaxEntries(), Stats: g.maps[tables.MapStats].MaxEntries(),
		Buckets: g.maps[tables.MapBuckets].MaxEntries(), Slots: g.maps[tables.MapSlots].MaxEntries(),
		Hops:     g.maps[tables.MapHops].MaxEntries(),
		Egresses: g.maps[tables.MapEgresses].MaxEntries(), Places: g.maps[tables.MapPlaces].MaxEntries(),
	}
	return nil
}

// internalMap reports whether the compiler made a map of variables.
func internalMap(name string) bool { return strings.HasPrefix(name, ".") }

// sizeOf is max_entries of a map: maps that take their memory at once have the plan's size, the
// others that of bpf/lib/node/maps.h.
func sizeOf(t tables.Map, ms *ebpf.MapSpec, l tables.Limits) uint32 {
	switch t {
	case tables.MapHeadends:
		return l.Headends
	case tables.MapStats, tables.MapExits, tables.MapPathMTUs:
		return l.Stats
	case tables.MapHops:
		return l.Hops
	case tables.MapEgresses:
		return l.Egresses
	case tables.MapPlaces:
		return l.Places
	case tables.MapBuckets:
		return l.Buckets
	case tables.MapCache:
		return l.Buckets * abi.Ways
	case tables.MapSlots:
		return l.Slots
	}
	return ms.MaxEntries
}

// buildGeneration loads programs with empty maps of their own and pins them in a directory of
// their own.
func (d *Dataplane) buildGeneration(cfg abi.Config, l tables.Limits, carry map[tables.Map]*ebpf.Map, programs []string) (_ *generation, err error) {
	g := &generation{
		identity: identityOf(cfg), limits: l,
		dir:  filepath.Join(d.dir, "new-"+rand.Text()),
		maps: map[tables.Map]*ebpf.Map{}, programs: map[string]*ebpf.Program{}, constants: map[string]*ebpf.Map{},
	}
	whole, _, err := generationDirs(d.dir)
	if err != nil {
		return nil, err
	}
	if cfg.FingerprintKey, err = newFingerprintKey(); err != nil {
		return nil, err
	}
	g.seq = 1
	if len(whole) > 0 {
		last, _, _ := parseGenerationName(whole[0])
		g.seq = last + 1
	}
	if err := os.Mkdir(g.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make a directory for pins: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close(), removeTree(g.dir))
		}
	}()

	if err := d.loadObjects(g, cfg, carry, programs); err != nil {
		return nil, err
	}
	for name, m := range g.maps {
		if err := d.cfg.step(stepPin, string(name)); err != nil {
			return nil, err
		}
		if err := m.Pin(filepath.Join(g.dir, string(name))); err != nil {
			return nil, fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	if err := d.pinPrograms(g, programs); err != nil {
		return nil, err
	}
	return g, nil
}

// newFingerprintKey makes the key of a content cache. With the key, an attacker could make
// different packets with equal fingerprints.
func newFingerprintKey() (key [2]uint64, err error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return key, fmt.Errorf("draw the key of the cache: %w", err)
	}
	return [2]uint64{binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])}, nil
}

// pinPrograms pins programs of g.
func (d *Dataplane) pinPrograms(g *generation, programs []string) error {
	for _, name := range programs {
		if err := d.cfg.step(stepPin, name); err != nil {
			return err
		}
		if err := g.programs[name].Pin(filepath.Join(g.dir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
		// Only the program's pin was removed.
		if err := os.Remove(filepath.Join(g.dir, constantsPin(name))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the constants of another program %s: %w", name, err)
		}
		if err := g.constants[name].Pin(filepath.Join(g.dir, constantsPin(name))); err != nil {
			return fmt.Errorf("pin the constants of program %s: %w", name, err)
		}
	}
	return nil
}

// loadObjects makes the maps of g, including maps without a program so far, and loads programs
// with them.
func (d *Dataplane) loadObjects(g *generation, cfg abi.Config, carry map[tables.Map]*ebpf.Map, programs []string) error {
	specs, err := object.LoadMaps()
	if err != nil {
		return err
	}
	if err := d.makeMaps(g, specs, carry); err != nil {
		return err
	}
	if err := g.emptyMatch(); err != nil {
		return err
	}
	return d.loadPrograms(g, cfg, programs)
}

// loadPrograms loads programs with the maps of g: as many at once as there are CPUs,
// since the verifier takes a tenth of a second or more for each.
func (d *Dataplane) loadPrograms(g *generation, cfg abi.Config, programs []string) error {
	specs := make([]*ebpf.CollectionSpec, len(programs))
	for i, name := range programs {
		spec, err := object.Load(name)
		if err != nil {
			return fmt.Errorf("read the object of %s: %w", name, err)
		}
		if err := spec.Variables[object.VarConfig].Set(cfg); err != nil {
			return fmt.Errorf("configure %s: %w", name, err)
		}
		if err := g.sizeMaps(spec.Maps); err != nil {
			return err
		}
		specs[i] = spec
	}
	loaded, constants := make([]*ebpf.Program, len(programs)), make([]*ebpf.Map, len(programs))
	var load errgroup.Group
	load.SetLimit(runtime.GOMAXPROCS(0))
	var broken error
	for i, name := range programs {
		if broken = d.cfg.step(stepLoad, name); broken != nil {
			break
		}
		load.Go(func() (err error) {
			loaded[i], constants[i], err = loadProgram(name, specs[i], g.maps)
			if looksUp(name) && errors.Is(err, ebpf.ErrNotSupported) {
				return errNoLookUp
			}
			if err == nil && constants[i] == nil {
				err = fmt.Errorf("the object of %s has no constants", name)
			}
			return err
		})
	}
	err := errors.Join(broken, load.Wait())
	if g.constants == nil {
		g.constants = map[string]*ebpf.Map{}
	}
	for i, p := range loaded {
		if p != nil { // also if another could not be loaded: g closes it
			g.programs[programs[i]], g.constants[programs[i]] = p, constants[i]
		}
	}
	if err != nil {
		return err
	}
	return g.connect()
}

// need loads the programs that g lacks, with the configuration of its other programs. After an
// error g is unchanged.
func (d *Dataplane) need(g *generation, programs []string) (err error) {
	var missing []string
	for _, name := range programs {
		if g.programs[name] == nil {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	defer func() {
		if err == nil {
			return
		}
		for _, name := range missing {
			if p := g.programs[name]; p != nil {
				c := g.constants[name]
				err = errors.Join(err, p.Unpin(), p.Close(), c.Unpin(), c.Close())
				delete(g.programs, name)
				delete(g.constants, name)
			}
		}
	}()
	cfg, err := g.config()
	if err != nil {
		return fmt.Errorf("read how the programs at work are configured: %w", err)
	}
	if err := d.loadPrograms(g, cfg, missing); err != nil {
		return err
	}
	return d.pinPrograms(g, missing)
}

// constantsPin is the pin of a program's constants. Opening them by their id, which the program
// has, needs CAP_SYS_ADMIN.
func constantsPin(program string) string { return program + "-constants" }

// config is the configuration with which the programs of g were loaded. Only their constants
// have the key of the caches.
func (g *generation) config() (cfg abi.Config, err error) {
	for name := range g.programs {
		return configOf(name, g.constants[name])
	}
	return cfg, errors.New("none is there")
}

// configOf reads the constants of a program.
func configOf(name string, constants *ebpf.Map) (cfg abi.Config, err error) {
	spec, err := object.Load(name)
	if err != nil {
		return cfg, err
	}
	v := spec.Variables[object.VarConfig]
	b, err := constants.LookupBytes(uint32(0))
	if err != nil {
		return cfg, fmt.Errorf("read the constants of %s: %w", name, err)
	}
	from := int(v.Offset)
	if from+int(v.Size()) > len(b) {
		return cfg, fmt.Errorf("the constants of %s are %d bytes", name, len(b))
	}
	_, err = binary.Decode(b[from:], binary.NativeEndian, &cfg)
	return cfg, err
}

// jumps are the maps and keys of tail calls.
var jumps = []struct {
	table   tables.Map
	at      uint32
	program string
}{
	{tables.MapPrograms, abi.ProgramExt, object.ExtTC},
	{tables.MapPrograms, abi.ProgramOriginate, object.OriginateTC},
	{tables.MapPrograms, abi.ProgramStream, object.StreamTC},
	{tables.MapPrograms, abi.ProgramMPLS, object.MPLSTC},
	{tables.MapPrograms, abi.ProgramMPLSOut, object.MPLSOutTC},
	{tables.MapPrograms, abi.ProgramGateway, object.GatewayTC},
	{tables.MapPrograms, abi.ProgramBypass, object.BypassTC},
	{tables.MapPrograms, abi.ProgramMPLSBypass, object.MPLSBypassTC},
	{tables.MapProgramsXDP, abi.ProgramXDPCore, object.MPLSCoreXDP},
	{tables.MapProgramsXDP, abi.ProgramXDPEdge, object.MPLSEdgeXDP},
}

// connect enters the programs of g into the maps for tail calls. The kernel clears such a map
// when it has no more references: no pin, and no process.
func (g *generation) connect() error {
	for _, j := range jumps {
		p := g.programs[j.program]
		if p == nil {
			continue // no packet takes this tail call; it would fail, and TC would refuse the packet
		}
		if err := g.maps[j.table].Put(j.at, p); err != nil {
			return fmt.Errorf("write to map %s: %w", j.table, err)
		}
	}
	return nil
}

// makeMaps makes the maps that g does not have yet.
func (d *Dataplane) makeMaps(g *generation, specs map[string]*ebpf.MapSpec, carry map[tables.Map]*ebpf.Map) (err error) {
	if err := g.sizeMaps(specs); err != nil {
		return err
	}
	for name, ms := range specs {
		t := tables.Map(name)
		if internalMap(name) || g.maps[t] != nil {
			continue
		}
		if err := d.cfg.step(stepCreateMap, name); err != nil {
			return err
		}
		if g.maps[t], err = newMap(ms, carry[t]); err != nil {
			delete(g.maps, t)
			return fmt.Errorf("create map %s: %w", name, err)
		}
	}
	return nil
}

// sizeMaps sets the sizes of g in the maps of an object.
func (g *generation) sizeMaps(specs map[string]*ebpf.MapSpec) error {
	for name, ms := range specs {
		if internalMap(name) {
			continue
		}
		t := tables.Map(name)
		ms.MaxEntries = sizeOf(t, ms, g.limits)
		switch t {
		case tables.MapWindows:
			ms.InnerMap.MaxEntries = windowSlabs().spec.MaxEntries
		case tables.MapNumbers:
			cpus, err := ebpf.PossibleCPU()
			if err != nil {
				return fmt.Errorf("count CPUs: %w", err)
			}
			ms.InnerMap.MaxEntries = numberSlabs(cpus).spec.MaxEntries
		case tables.MapMatch:
			ms.InnerMap.MaxEntries = g.limits.Lines
		}
	}
	return nil
}

// loadProgram loads one object's program, with the given maps in place of its own. The caller
// closes both results. The constants are nil if the object has none.
func loadProgram(program string, spec *ebpf.CollectionSpec, maps map[tables.Map]*ebpf.Map) (_ *ebpf.Program, constants *ebpf.Map, err error) {
	shared := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		if !internalMap(name) {
			shared[name] = maps[tables.Map(name)]
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, nil, fmt.Errorf("load %s into the kernel: %w", program, err)
	}
	defer coll.Close()
	p := coll.DetachProgram(program)
	if p == nil {
		return nil, nil, fmt.Errorf("the object of %s has no program of that name", program)
	}
	for name := range coll.Maps {
		if strings.HasSuffix(name, ".rodata") {
			constants = coll.DetachMap(name)
		}
	}
	return p, constants, nil
}

// newMap makes a map, or takes one over that is just like it.
func newMap(ms *ebpf.MapSpec, old *ebpf.Map) (*ebpf.Map, error) {
	if old != nil && ms.Compatible(old) == nil {
		return old.Clone()
	}
	return ebpf.NewMap(ms)
}

// commit gives the generation its name, and with it makes it the newest.
func (d *Dataplane) commit(g *generation) error {
	if err := d.cfg.step(stepCommit, g.dir); err != nil {
		return err
	}
	final := filepath.Join(d.dir, generationName(g.seq, g.identity))
	if err := os.Rename(g.dir, final); err != nil {
		return fmt.Errorf("name the new generation: %w", err)
	}
	g.dir = final
	return nil
}

// removeOthers removes all generations but g.
func (d *Dataplane) removeOthers(g *generation) error {
	whole, unfinished, err := generationDirs(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // they were removed; see KeepPins
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range append(whole, unfinished...) {
		if path := filepath.Join(d.dir, name); path != g.dir {
			errs = append(errs, d.cfg.step(stepRemoveOld, name), removeTree(path))
		}
	}
	return errors.Join(errs...)
}
