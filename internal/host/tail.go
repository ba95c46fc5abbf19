package host

import "sync"

// tailMost is the length that is kept of a process's output: it could write for ever.
const tailMost = 4 << 10

// Tail keeps the last bytes that are written to it. It is safe for concurrent use.
type Tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *Tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b[max(0, len(b)-tailMost):]...)
	t.b = append(t.b[:0], t.b[max(0, len(t.b)-tailMost):]...)
	return len(b), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
