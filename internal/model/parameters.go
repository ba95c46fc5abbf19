package model

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// ParametersMax is the largest number that the lowest 48 bits of a SID hold.
const ParametersMax = 1<<48 - 1

// Parameters are the parameters of a chain's visit to a function of kind stream, in each direction;
// 0: none.
type Parameters struct {
	Function         string // of kind stream; a chain visits it once in each direction
	Forward, Reverse uint64
}

// ParametersOf are the parameters of the visit to a function in the forward direction; 0: none.
func (c Chain) ParametersOf(function string) uint64 { return c.bothParametersOf(function).Forward }

func (c Chain) bothParametersOf(function string) Parameters {
	p, _ := find(c.Parameters, func(p Parameters) bool { return p.Function == function })
	p.Function = function
	return p
}

// InstanceOf is the name of the instance of a function of kind stream that has a chain's connections, and its parameters. Without
// parameters it is the function's own name.
func (c Chain) InstanceOf(function string) (string, Parameters) {
	p := c.bothParametersOf(function)
	return p.instance(), p
}

// instance is the function's name, a colon, and the parameters; behind another colon those of the way back, if they differ. No function of
// a file has such a name.
func (p Parameters) instance() string {
	switch {
	case p.Forward == 0 && p.Reverse == 0:
		return p.Function
	case p.Forward == p.Reverse:
		return fmt.Sprintf("%s:%s", p.Function, ParametersText(p.Forward))
	}
	return fmt.Sprintf("%s:%s:%s", p.Function, ParametersText(p.Forward), ParametersText(p.Reverse))
}

// ParametersText is how parameters are written.
func ParametersText(p uint64) string {
	if p == 0 {
		return "0"
	}
	return fmt.Sprintf("0x%x", p)
}

// ReadInstance takes the name of an instance apart. A name without parameters is a function's own.
func ReadInstance(name string) (Parameters, error) {
	parts := strings.Split(name, ":")
	p := Parameters{Function: parts[0]}
	if err := CheckName(p.Function); err != nil {
		return p, err
	}
	switch len(parts) {
	case 1:
		return p, nil
	case 2:
		parts = append(parts, parts[1])
	case 3:
	default:
		return p, errors.New("has more than two colons; expect a function, its parameters, and those of the way back")
	}
	for i, to := range []*uint64{&p.Forward, &p.Reverse} {
		n, err := strconv.ParseUint(strings.TrimPrefix(parts[i+1], "0x"), 16, 64)
		if err != nil || n > ParametersMax {
			return p, fmt.Errorf("%q is not parameters: 0x and up to 12 hexadecimal digits", parts[i+1])
		}
		*to = n
	}
	if p.instance() != name {
		return p, fmt.Errorf("is not how an instance is written; expect %s", p.instance())
	}
	return p, nil
}

// CheckInstanceName holds the rule for the name of a function in a plan: of the file, or of an
// instance.
func CheckInstanceName(name string) error {
	_, err := ReadInstance(name)
	return err
}

// CheckParametersOf holds which functions may have parameters of visits.
func CheckParametersOf(f Function) error {
	switch {
	case f.Intrusive:
		return errors.New("is intrusive, and the sealed connections through it have no parameters; leave them out")
	case f.Kind != KindStream:
		return fmt.Errorf("is of kind %s, and only functions of kind stream take parameters", f.Kind)
	}
	return nil
}

// IsOf reports whether the name is that of a function, or of one of its instances.
func IsOf(name, function string) bool {
	of, _, _ := strings.Cut(name, ":")
	return name == function || of == function
}
