package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/netfilter"
)

// completeRules reads the rules that a domain's functions have in files of their own,
// from the folder of the domain's file, and checks all rules with nft. What could not be
// checked is a warning. The error is one for all that is wrong.
func completeRules(ctx context.Context, d *model.Domain, file string, stderr io.Writer) error {
	var errs []error
	for i := range d.Functions {
		f := &d.Functions[i]
		if f.Netfilter.Namespace == "" { // it has no rules
			continue
		}
		if err := readRules(&f.Netfilter, filepath.Dir(file)); err != nil {
			errs = append(errs, fmt.Errorf("%s: rules-file of function %s: %w", ShownName(file), f.Name, err))
			continue
		}
		if f.Netfilter.Rules == "" {
			continue
		}
		err := netfilter.Check(ctx, ruleset(*d, *f))
		if unknown, ok := errors.AsType[*netfilter.NotCheckedError](err); ok {
			fmt.Fprintf(stderr, "%s: warning: %v\n", ShownName(file), unknown)
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		at := netfilter.TranslatesAddresses(f.Netfilter.Rules)
		if at > 0 && f.Intrusive {
			errs = append(errs, fmt.Errorf("%s:%d: rules of function %s have a chain of type nat; the connections through an intrusive function keep their addresses and ports: leave the chain out",
				f.Netfilter.RulesAt.File, max(1, f.Netfilter.RulesAt.Line)+at-1, f.Name))
			continue
		}
		if at > 0 && !f.Proxy.Rewrites {
			errs = append(errs, fmt.Errorf("%s:%d: rules of function %s have a chain of type nat; set rewrites: true at the function, so that its packets may leave with other addresses",
				f.Netfilter.RulesAt.File, max(1, f.Netfilter.RulesAt.Line)+at-1, f.Name))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return &ExitError{Code: ExitUsage, Err: err}
	}
	return nil
}

// readRules reads the file that has the rules, if there is one.
func readRules(n *model.Netfilter, folder string) error {
	if n.RulesFile == "" {
		return nil
	}
	name := n.RulesFile
	if !filepath.IsAbs(name) {
		name = filepath.Join(folder, name)
	}
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s does not exist; a relative name starts from the folder of the domain's file", name)
	}
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, model.RulesMax+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if len(text) > model.RulesMax {
		return fmt.Errorf("%s has more than %d bytes", name, model.RulesMax)
	}
	n.Rules, n.RulesAt = string(text), model.Source{File: name, Line: 1, Column: 1}
	return nil
}

// ruleset is what nft is asked about. The interfaces of the node are known to rules that
// run there; those of a namespace of somebody else are known on the node alone.
func ruleset(d model.Domain, f model.Function) netfilter.Ruleset {
	at := f.Netfilter.RulesAt
	s := netfilter.Ruleset{
		Function:  f.Name,
		Text:      f.Netfilter.Rules,
		At:        netfilter.Source{File: at.File, Line: at.Line, Column: at.Column},
		Arguments: f.Netfilter.Arguments,
		Bypass:    f.Netfilter.BypassMark(f.Name),
	}
	if f.Netfilter.Zones { // whether the kernel has them is all that is asked
		for _, v := range f.Netfilter.Arguments {
			s.Zones = append(s.Zones, []uint32{v})
		}
	}
	if n, ok := d.Node(f.Node); ok && f.Netfilter.Namespace == model.NamespaceNode {
		for _, i := range n.Interfaces {
			s.Interfaces = append(s.Interfaces, i.Name)
		}
	}
	return s
}
