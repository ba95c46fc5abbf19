// Package metrics writes numbers in Prometheus' text format, version 0.0.4. Which there are is a
// table, from which their documentation is made, too: a number that is in no table is not
// written, and one that is has its labels. It knows nothing of what the numbers mean.
package metrics

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// ContentType is what HTTP calls the format.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Type is what a number is.
type Type string

// The types that there are. Summary is two numbers, NAME_sum and NAME_count.
const (
	Counter Type = "counter"
	Gauge   Type = "gauge"
	Summary Type = "summary"
)

// Metric is one line of a table.
type Metric struct {
	Name   string // with its unit at the end
	Type   Type
	Labels []string
	Help   string // a sentence
}

// Table is all metrics of a program, by name.
type Table []Metric

// Set is numbers of a table at one moment, or counters that go on. Its methods may be called by several
// goroutines.
type Set struct {
	table Table
	mu    sync.Mutex
	have  map[string]map[string]value // by metric, and by labels as they are written
}

type value struct {
	is    float64
	count uint64 // of a summary
}

// NewSet has no numbers yet.
func NewSet(table Table) *Set {
	return &Set{table: table, have: map[string]map[string]value{}}
}

// change finds a number and changes it. What is in no table, or has other labels than there, is a
// mistake of the program.
func (s *Set) change(name string, t Type, labels []string, f func(value) value) {
	i := slices.IndexFunc(s.table, func(m Metric) bool { return m.Name == name })
	if i < 0 || s.table[i].Type != t || len(s.table[i].Labels) != len(labels) {
		panic(fmt.Sprintf("no %s %s with labels %q is in the table", t, name, labels))
	}
	var text []string
	for n, l := range s.table[i].Labels {
		text = append(text, l+`="`+escape.Replace(strings.ToValidUTF8(labels[n], "?"))+`"`)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.have[name] == nil {
		s.have[name] = map[string]value{}
	}
	key := strings.Join(text, ",")
	s.have[name][key] = f(s.have[name][key])
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// Set gives a gauge a value.
func (s *Set) Set(name string, to float64, labels ...string) {
	s.change(name, Gauge, labels, func(value) value { return value{is: to} })
}

// Add raises a counter; by 0 it is there from the start.
func (s *Set) Add(name string, by uint64, labels ...string) {
	s.change(name, Counter, labels, func(v value) value { return value{is: v.is + float64(by)} })
}

// Observe adds an observation to a summary.
func (s *Set) Observe(name string, x float64, labels ...string) {
	s.change(name, Summary, labels, func(v value) value { return value{v.is + x, v.count + 1} })
}

// AddAll adds observations to a summary that were made elsewhere: their sum, and how many they are.
func (s *Set) AddAll(name string, sum float64, count uint64, labels ...string) {
	s.change(name, Summary, labels, func(v value) value { return value{v.is + sum, v.count + count} })
}

// Write writes all numbers of some sets of one table, in the order of the table. What two sets
// have is written of the last.
func Write(w io.Writer, table Table, sets ...*Set) error {
	var b strings.Builder
	for _, m := range table {
		all := map[string]value{}
		for _, s := range sets {
			s.mu.Lock()
			maps.Copy(all, s.have[m.Name])
			s.mu.Unlock()
		}
		if len(all) == 0 {
			continue
		}
		fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", m.Name, strings.NewReplacer(`\`, `\\`, "\n", `\n`).Replace(m.Help), m.Name, m.Type)
		for _, labels := range slices.Sorted(maps.Keys(all)) {
			v, in := all[labels], ""
			if labels != "" {
				in = "{" + labels + "}"
			}
			if m.Type == Summary {
				fmt.Fprintf(&b, "%s_sum%s %s\n%s_count%s %d\n", m.Name, in, number(v.is), m.Name, in, v.count)
				continue
			}
			fmt.Fprintf(&b, "%s%s %s\n", m.Name, in, number(v.is))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func number(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) }
