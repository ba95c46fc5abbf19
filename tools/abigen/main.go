// Command abigen writes the Go side of the contract between the kernel and
// user space, internal/abi, and the page docs/reference/refusals.md, from the
// headers in bpf/include/waystamp. It asks the pinned clang what the headers
// say, and so reads them as the programs do. `make generate` runs it.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	clang := flag.String("clang", "", "the pinned clang (make generate gives it)")
	include := flag.String("include", "bpf/include", "folder that holds waystamp/abi.h")
	goDir := flag.String("go", "internal/abi", "folder to write the Go files to")
	page := flag.String("page", "docs/reference/refusals.md", "reference page to write")
	flag.Parse()
	if err := run(*clang, *include, *goDir, *page); err != nil {
		fmt.Fprintf(os.Stderr, "abigen: %v\n", err)
		os.Exit(1)
	}
}

// run reads the headers and writes all files, or none if a header has what
// abigen cannot express.
func run(clang, include, goDir, page string) error {
	if clang == "" {
		return fmt.Errorf("no -clang given; use `make generate`")
	}
	c, err := readContract(clang, include)
	if err != nil {
		return err
	}
	consts, err := renderConstants(c)
	if err != nil {
		return err
	}
	enums, err := renderEnums(c)
	if err != nil {
		return err
	}
	types, err := renderTypes(c)
	if err != nil {
		return err
	}
	for _, f := range []struct {
		path string
		text []byte
	}{
		{filepath.Join(goDir, "constants.go"), consts},
		{filepath.Join(goDir, "enums.go"), enums},
		{filepath.Join(goDir, "types.go"), types},
		{page, renderPage(c)},
	} {
		if err := os.WriteFile(f.path, f.text, 0o644); err != nil {
			return fmt.Errorf("write generated file: %w", err)
		}
	}
	return nil
}
