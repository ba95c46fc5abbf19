package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// structure is a struct that programs and user space share.
type structure struct {
	C       string // ws_hop_key
	Comment string // what the header says above it; may be empty
	Type    *btf.Struct
}

var reStruct = regexp.MustCompile(`(?m)^struct (ws_\w+) \{$`)

// readStructs compiles the header with debug information and takes the layout of
// each struct from there.
func readStructs(clang, include string, header []byte) (out []structure, err error) {
	var src strings.Builder
	src.WriteString("#include <waystamp/abi.h>\n")
	for _, m := range reStruct.FindAllSubmatchIndex(header, -1) {
		s := structure{C: string(header[m[2]:m[3]]), Comment: commentAbove(header[:m[0]])}
		out = append(out, s)
		fmt.Fprintf(&src, "struct %s wsabi_struct_%s;\n", s.C, s.C)
	}
	dir, err := os.MkdirTemp("", "abigen-*")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the object: %w", err)
	}
	defer os.RemoveAll(dir)
	object := filepath.Join(dir, "structs.o")
	// Not to standard output: BTF is read from a file.
	cmd := exec.Command(clang, "-target", "bpf", "-nostdinc", "-Wall", "-Werror", "-I", include, "-g", "-O2", "-c", "-x", "c", "-o", object, "-")
	cmd.Stdin = strings.NewReader(src.String())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("run %s: %w\n%s", strings.Join(cmd.Args, " "), err, stderr.Bytes())
	}
	spec, err := btf.LoadSpec(object)
	if err != nil {
		return nil, fmt.Errorf("read the types of the contract: %w", err)
	}
	for i, s := range out {
		if err := spec.TypeByName(s.C, &out[i].Type); err != nil {
			return nil, fmt.Errorf("struct %s: %w", s.C, err)
		}
	}
	return out, nil
}

// field is the Go name of a struct's field: LpcShoup of lpc_shoup.
func field(c string) string {
	var b strings.Builder
	for w := range strings.SplitSeq(c, "_") {
		if w != "" {
			b.WriteString(strings.ToUpper(w[:1]) + w[1:])
		}
	}
	return b.String()
}

func renderTypes(c contract) ([]byte, error) {
	if len(c.Structs) == 0 {
		return gofmt([]byte(header))
	}
	names := map[btf.Type]string{}
	for _, s := range c.Structs {
		names[s.Type] = camel(strings.ToUpper(strings.TrimPrefix(s.C, "ws_")))
	}
	f := btf.GoFormatter{Names: names, Identifier: field}
	var b bytes.Buffer
	b.WriteString(header + "import \"structs\"\n\n")
	for _, s := range c.Structs {
		name := names[s.Type]
		text := fmt.Sprintf("%s is struct %s.", name, s.C)
		if s.Comment != "" {
			text += " " + s.Comment
		}
		b.WriteString(wrap("// ", text))
		decl, err := f.TypeDeclaration(name, s.Type)
		if err != nil {
			return nil, fmt.Errorf("struct %s: %w", s.C, err)
		}
		b.WriteString(decl + "\n\n")
	}
	return gofmt(b.Bytes())
}
