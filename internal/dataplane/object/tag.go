package object

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"

	"github.com/cilium/ebpf/btf"
)

// tagSize is the number of bytes of a hash that are a tag: BPF_TAG_SIZE of linux/bpf.h.
const tagSize = 8

// Tag is what the kernel hashes a program's instructions to, as bpftool prog prints it.
type Tag struct {
	SHA256 string `json:"sha256"` // of Linux 6.18 and later
	SHA1   string `json:"sha1"`   // of kernels before
}

// Tag hashes the instructions as bpf_prog_calc_tag does: without the maps that they load, which
// differ from load to load. Nil: CO-RE relocates the program for the kernel that loads it, so its tag differs from kernel to kernel.
func (o Object) Tag() (*Tag, error) {
	spec, err := o.Load()
	if err != nil {
		return nil, fmt.Errorf("read the object of %s for its tag: %w", o.Program, err)
	}
	program := spec.Programs[o.Program]
	if program == nil {
		return nil, fmt.Errorf("the object of %s has no such program", o.Program)
	}
	// Marshal has a call of a subprogram name its place, as the loader does.
	order := program.ByteOrder
	if err := program.Instructions.Marshal(io.Discard, order); err != nil {
		return nil, fmt.Errorf("encode %s for its tag: %w", o.Program, err)
	}
	sums := []hash.Hash{sha256.New(), sha1.New()}
	all := io.MultiWriter(sums[0], sums[1])
	for _, instruction := range program.Instructions {
		if btf.CORERelocationMetadata(&instruction) != nil {
			return nil, nil
		}
		if instruction.IsLoadFromMap() {
			instruction.Constant = 0
		}
		if _, err := instruction.Marshal(all, order); err != nil {
			return nil, fmt.Errorf("encode %s for its tag: %w", o.Program, err)
		}
	}
	of := func(sum hash.Hash) string { return hex.EncodeToString(sum.Sum(nil)[:tagSize]) }
	return &Tag{of(sums[0]), of(sums[1])}, nil
}
