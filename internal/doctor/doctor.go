// Package doctor tells what is wrong with a machine that shall run a node: its kernel,
// the rights of the process, its directories, and the settings of its interfaces beside
// a plan. A check tries the thing where it can, instead of reading a version. waystamp
// doctor prints all of it; the agent asks for the settings and warns with the same
// sentences.
package doctor

import (
	"fmt"
	"slices"
)

// Verdict is what a check came to.
type Verdict string

const (
	Yes     Verdict = "yes"
	No      Verdict = "no"
	Unknown Verdict = "unknown" // it could not tell
)

// Weight is what it means if a check says no.
type Weight string

const (
	Fatal   Weight = "fatal"   // the agent does not start
	Warning Weight = "warning" // packets are lost, or a promise is not kept
	Cost    Weight = "cost"    // it works, and slower
)

// Finding is what one check of a Report found. Says, Effect and Mend make a sentence.
type Finding struct {
	Check   string  `json:"check"`            // its name
	About   string  `json:"about,omitempty"`  // the interface, program or directory
	Verdict Verdict `json:"verdict"`          // yes: all is well; no; or unknown: it could not tell
	Weight  Weight  `json:"weight"`           // of a no: fatal, the agent does not start; warning; or cost, it works, and slower
	Says    string  `json:"says"`             // what it found
	Effect  string  `json:"effect,omitempty"` // what then does not work
	Mend    string  `json:"mend,omitempty"`   // a command, or what to do

	fix func() error // does what Mend says, where that cannot open a hole
}

// String is the finding as one sentence, as the agent says it.
func (f Finding) String() string {
	s := f.Says
	if f.Effect != "" {
		s += ", so that " + f.Effect
	}
	if f.Mend != "" {
		s += ": " + f.Mend
	}
	return s
}

// Report is what waystamp doctor -o json prints: what all checks found, in their order.
type Report struct {
	Version  int       `json:"version"`  // of this format
	Findings []Finding `json:"findings"` // of all checks, also those that say yes
}

// ReportVersion is the version of the report's JSON.
const ReportVersion = 1

// Fit tells whether the machine is fit: No if something is wrong, Unknown if nothing is
// but a check could not tell. What merely costs is not wrong.
func (r Report) Fit() Verdict {
	fit := Yes
	for _, f := range r.Findings {
		switch {
		case f.Weight == Cost:
		case f.Verdict == No:
			return No
		case f.Verdict == Unknown:
			fit = Unknown
		}
	}
	return fit
}

// Fixable are the findings that Fix would mend.
func (r Report) Fixable() []Finding {
	return slices.DeleteFunc(slices.Clone(r.Findings), func(f Finding) bool { return f.fix == nil })
}

// Fix does what a finding says, and says what it did not do.
func (f Finding) Fix() error {
	if err := f.fix(); err != nil {
		return fmt.Errorf("%s: %w", f.Mend, err)
	}
	return nil
}

// The three verdicts of a check.
func (c check) yes(format string, args ...any) Finding {
	return Finding{Check: c.name, About: c.about, Verdict: Yes, Weight: c.weight, Says: fmt.Sprintf(format, args...)}
}

func (c check) no(effect, mend, format string, args ...any) Finding {
	return Finding{Check: c.name, About: c.about, Verdict: No, Weight: c.weight, Says: fmt.Sprintf(format, args...), Effect: effect, Mend: mend}
}

func (c check) unknown(err error) Finding {
	return Finding{Check: c.name, About: c.about, Verdict: Unknown, Weight: c.weight, Says: err.Error()}
}

// check is what is asked.
type check struct {
	name, about string
	weight      Weight
}
