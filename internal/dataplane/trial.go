package dataplane

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/waystamp/waystamp/internal/abi"
	"github.com/waystamp/waystamp/internal/dataplane/object"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/tables"
)

// Extra is something that newer kernels have and the data path can do without.
type Extra struct {
	Name, Since, Without string
	Have                 bool
	Err                  error // it could not be found out
}

// Extras tries them. It changes nothing.
func Extras() []Extra {
	tcx := haveTCX()
	_, redirects := host.TakesRedirects(1)
	decap, err := false, checkCapabilities()
	if err == nil {
		decap, err = haveDecapL3()
	}
	unsupported := func(err error) error {
		if errors.Is(err, ebpf.ErrNotSupported) {
			return nil
		}
		return err
	}
	lookup := haveLookUp()
	return []Extra{
		{"tcx (programs at TC by link)", "6.6", "filters of clsact hold the programs, which anybody who may configure the network can take away", tcx == nil, unsupported(tcx)},
		{"the netlink family netdev", "6.3", "XDP leaves all packets to TC", redirects == nil, nil},
		{"the flag DECAP_L3 of bpf_skb_adjust_room", "6.3", "each IPv4 packet pays one helper call more; super-packets of IPv4 that were in a tunnel before their headend, or come back whole from a function, pay five", decap, err},
		{"the function bpf_skb_ct_lookup (with the module nf_conntrack loaded)", "5.18", "plans with a function that has bypass: established are refused", lookup == nil, unsupported(lookup)},
	}
}

// Trial is the load of one program.
type Trial struct {
	Program string
	Alone   bool  // only workers of byte streams need it
	Err     error // the kernel's verifier has refused it
}

// haveLookUp tries the one program that looks flows up.
func haveLookUp() error {
	if err := checkCapabilities(); err != nil {
		return err
	}
	for _, o := range object.All {
		if o.Program == object.BypassTC {
			return tryProgram(o, abi.Config{}, trialLimits)
		}
	}
	return fmt.Errorf("there is no program %s", object.BypassTC)
}

// looksUp: the program reads the kernel's connection tracking, which not every kernel offers to programs.
func looksUp(program string) bool {
	return program == object.BypassTC || program == object.MPLSBypassTC
}

// trialLimits are as low as can be: sizes are nothing to the verifier.
var trialLimits = tables.Limits{Lines: tables.LinesLeast, Headends: 1, Stats: 1, Hops: 1, Egresses: 1, Places: 1, Buckets: 1, Slots: 1}

// TryPrograms loads each program, and attaches and pins none. It does not try features of Extras
// that the kernel lacks.
func TryPrograms() ([]Trial, error) {
	cfg := abi.Config{}
	if err := checkCapabilities(); err != nil {
		return nil, err
	}
	if have, err := haveDecapL3(); err != nil {
		return nil, err
	} else if have {
		cfg.DecapL3 = 1
	}
	var out []Trial
	for _, o := range slices.Concat(object.All, object.Alone) {
		err := tryProgram(o, cfg, trialLimits)
		if looksUp(o.Program) && errors.Is(err, ebpf.ErrNotSupported) {
			continue
		}
		out = append(out, Trial{o.Program, slices.ContainsFunc(object.Alone, func(a object.Object) bool { return a.Program == o.Program }), lastLines(err)})
	}
	return out, nil
}

func tryProgram(o object.Object, cfg abi.Config, limits tables.Limits) (err error) {
	spec, err := o.Load()
	if err != nil {
		return err
	}
	v := spec.Variables[object.VarConfig]
	if v == nil { // it is of no generation
		c, err := ebpf.NewCollection(spec)
		if err != nil {
			return err
		}
		c.Close()
		return nil
	}
	if err := v.Set(cfg); err != nil {
		return err
	}
	g := &generation{limits: limits, maps: map[tables.Map]*ebpf.Map{}}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := new(Dataplane).makeMaps(g, spec.Maps, nil); err != nil {
		return err
	}
	p, constants, err := loadProgram(o.Program, spec, g.maps)
	if err != nil {
		return err
	}
	return errors.Join(p.Close(), constants.Close())
}

// lastLines is an error with the end of the verifier's log, which has the reason.
func lastLines(err error) error {
	var refused *ebpf.VerifierError
	if !errors.As(err, &refused) {
		return err
	}
	const most = 6
	said := refused.Log[max(0, len(refused.Log)-most):]
	return fmt.Errorf("%w; the verifier's last lines:\n    %s", refused.Cause, strings.Join(said, "\n    "))
}
