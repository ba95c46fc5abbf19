package host

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SharedWords is memory that two processes have mapped: one writes numbers, the other
// reads them at any time, also when the writer hangs or has died.
type SharedWords struct {
	// Words may be read and written until Close.
	Words []atomic.Uint64

	file   *os.File
	memory []byte
}

// NewSharedWords makes n words of zero. A holder of File cannot change the size of the memory,
// so reading never faults.
func NewSharedWords(name string, n int) (*SharedWords, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make shared memory %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(n) * 8); err != nil {
		return nil, errors.Join(fmt.Errorf("size shared memory %s: %w", name, err), f.Close())
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return nil, errors.Join(fmt.Errorf("seal the size of shared memory %s: %w", name, err), f.Close())
	}
	return OpenSharedWords(f)
}

// OpenSharedWords maps the memory behind a file of NewSharedWords, which it takes over.
func OpenSharedWords(f *os.File) (*SharedWords, error) {
	st, err := f.Stat()
	if err == nil && (st.Size() == 0 || st.Size()%8 != 0 || st.Size() > 1<<30) {
		err = fmt.Errorf("%d bytes are no array of 64-bit words", st.Size())
	}
	var memory []byte
	if err == nil {
		memory, err = unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map shared memory %s: %w", f.Name(), err), f.Close())
	}
	// A mapping begins at a page, so its words are aligned.
	words := unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(&memory[0])), len(memory)/8)
	return &SharedWords{Words: words, file: f, memory: memory}, nil
}

// File is the memory as a file, to be handed to another process. It belongs to m.
func (m *SharedWords) File() *os.File { return m.file }

// Close unmaps the memory. It may be called more than once, and not while Words are
// used.
func (m *SharedWords) Close() error {
	if m.memory == nil {
		return nil
	}
	err := unix.Munmap(m.memory)
	m.memory, m.Words = nil, nil
	return errors.Join(err, m.file.Close())
}
