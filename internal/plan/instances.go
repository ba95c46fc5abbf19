package plan

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// Instances is the domain with an instance of a function of kind stream for each pair of parameters that chains visit it with, in place of
// the function there. An instance has the function's settings, and the parameters in its lists; its name is
// model.Chain.InstanceOf. A function that needs parameters is there as its instances alone. Nothing has to be done for a
// domain without parameters, which is returned as it is.
func Instances(d model.Domain) (model.Domain, error) {
	out, errs := instances(d)
	return out, errors.Join(errs...)
}

func instances(d model.Domain) (model.Domain, []error) {
	needs := map[string]bool{}
	for _, f := range d.Functions {
		if f.Kind == model.KindStream && function.NeedsParameters(f.Stream.Run, f.Stream.Back) {
			needs[f.Name] = true
		}
	}
	if len(needs) == 0 && !slices.ContainsFunc(d.Chains, func(c model.Chain) bool { return len(c.Parameters) > 0 }) {
		return d, nil
	}
	functions := make(map[string]model.Function, len(d.Functions))
	for _, f := range d.Functions {
		functions[f.Name] = f
	}
	var errs []error
	made := map[string]map[string]model.Function{} // by function and name
	plain := map[string]bool{}                     // functions that are visited without parameters
	d.Chains = slices.Clone(d.Chains)
	for i := range d.Chains {
		c := &d.Chains[i]
		if err := checkParameters(*c, functions); err != nil {
			errs = append(errs, fmt.Errorf("chain %s: %w", c.Name, err))
			continue
		}
		named := map[string]string{}
		for _, name := range c.Functions {
			f := functions[name]
			if f.Kind != model.KindStream {
				continue
			}
			instance, p := c.InstanceOf(name)
			if instance == name {
				plain[name] = true
				continue
			}
			named[name] = instance
			if made[name] == nil {
				made[name] = map[string]model.Function{}
			}
			f.Name, f.Proxy = instance, model.StreamDetour(instance)
			f.Stream.Run, f.Stream.Back, _ = function.WithParameters(f.Stream.Run, f.Stream.Back, p.Forward, p.Reverse) // they were checked
			made[name][instance] = f
		}
		if len(named) == 0 {
			continue
		}
		rename := func(list []string) []string {
			list = slices.Clone(list)
			for j, name := range list {
				if n := named[name]; n != "" {
					list[j] = n
				}
			}
			return list
		}
		c.Functions, c.Return = rename(c.Functions), rename(c.Return)
		c.Parameters = slices.Clone(c.Parameters)
		for j, p := range c.Parameters {
			c.Parameters[j].Function = named[p.Function]
		}
	}
	var all []model.Function
	for _, f := range d.Functions {
		if len(made[f.Name]) == 0 && !needs[f.Name] || plain[f.Name] {
			all = append(all, f)
		}
		for _, name := range slices.Sorted(maps.Keys(made[f.Name])) {
			all = append(all, made[f.Name][name])
		}
	}
	d.Functions = all
	return d, errs
}

// checkParameters holds what parameters of a chain need: a function of kind stream that the chain visits, and an operation there that takes
// them.
func checkParameters(c model.Chain, functions map[string]model.Function) error {
	given := map[string]bool{}
	for _, p := range c.Parameters {
		f, known := functions[p.Function]
		switch {
		case !known || !slices.Contains(c.Functions, p.Function):
			return fmt.Errorf("it has parameters for function %q, which it does not visit", p.Function)
		case given[p.Function]:
			return fmt.Errorf("it has parameters for function %s twice", p.Function)
		case max(p.Forward, p.Reverse) > model.ParametersMax:
			return fmt.Errorf("function %s: parameters %#x have more than 48 bits", p.Function, max(p.Forward, p.Reverse))
		case p.Forward == 0 && p.Reverse == 0:
			return fmt.Errorf("function %s: parameters of 0 are none; leave them out", p.Function)
		}
		given[p.Function] = true
		if err := model.CheckParametersOf(f); err != nil {
			return fmt.Errorf("function %s: %w", p.Function, err)
		}
	}
	for _, name := range c.Functions {
		f := functions[name]
		if f.Kind != model.KindStream || f.Stream.Attached != (model.Attached{}) {
			continue
		}
		_, p := c.InstanceOf(name)
		if _, _, err := function.WithParameters(f.Stream.Run, f.Stream.Back, p.Forward, p.Reverse); err != nil {
			return fmt.Errorf("function %s: %w", name, err)
		}
	}
	return nil
}
