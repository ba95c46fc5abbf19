package manifest

import (
	"fmt"
	"strings"

	"github.com/goccy/go-yaml/ast"
)

// Field is one field of the file, as the reader reads it.
type Field struct {
	Path     string // from the top, such as nodes[].interfaces[].role
	Required bool   // wherever what it is part of is given
	Takes    string // the values that it takes, such as "edge or core"
	Mapping  bool   // it has fields of its own, by themselves or in a list
	List     bool
}

// Name is the last part of the path.
func (f Field) Name() string {
	p := strings.TrimSuffix(f.Path, "[]")
	return p[strings.LastIndexByte(p, '.')+1:]
}

// outline collects the fields when the reader walks its own lists instead of a
// file.
type outline struct {
	fields []Field
	index  map[string]int // of fields, by path
}

// Fields lists every field that Parse knows, in the order of the reader's own
// lists and with the bounds that they give: nothing of it is written a second time.
func Fields() []Field {
	r := &reader{outline: &outline{index: map[string]int{}}}
	r.file(cursor{r: r, node: &ast.MappingNode{}})
	return r.outline.fields
}

// outlineFields enters the fields of a mapping, and then those that each of them has.
func (c cursor) outlineFields(fields []field) {
	o := c.r.outline
	if i, ok := o.index[c.at.path]; ok {
		o.fields[i].Mapping = true
	}
	for _, f := range fields {
		path := f.name
		if c.at.path != "" {
			path = c.at.path + "." + f.name
		}
		o.index[path] = len(o.fields)
		o.fields = append(o.fields, Field{Path: path, Required: f.required})
		f.read(cursor{r: c.r, node: &ast.MappingNode{}, at: place{path: path}})
	}
}

// outlineList enters that a field is a list, and what an element of it is.
func (c cursor) outlineList(read func(cursor)) {
	o := c.r.outline
	if i, ok := o.index[c.at.path]; ok {
		o.fields[i].List = true
		o.index[c.at.path+"[]"] = i
	}
	read(cursor{r: c.r, node: &ast.MappingNode{}, at: place{path: c.at.path + "[]"}})
}

// takes enters the values that a field takes. It reports whether the reader lists its
// fields, and there is nothing to read.
func (c cursor) takes(format string, args ...any) bool {
	if c.r.outline == nil {
		return false
	}
	if i, ok := c.r.outline.index[c.at.path]; ok {
		c.r.outline.fields[i].Takes = fmt.Sprintf(format, args...)
	}
	return true
}

// expected is the end of a message that says which values there are.
func expected(err error) string {
	_, values, _ := strings.Cut(fmt.Sprint(err), "; expect ")
	return values
}
