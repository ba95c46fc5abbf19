// Package await lets a command end while it computes. Reading a large file, checking
// and compiling it takes seconds, and nothing in there listens to a context; nor
// does anything have to be cleaned up. So it is not waited for. Whatever holds a
// lock, a file or a kernel object is not to be run by it. Commands, internal/lab and
// internal/agent call it. It also has the factor by which tests and labs multiply their deadlines.
package await

import "context"

// Do returns what f does, or the cause of ctx's end if that comes first; f then goes
// on to its end, and its result is lost.
func Do[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var none T
	if ctx.Err() != nil {
		return none, context.Cause(ctx)
	}
	done := make(chan result, 1)
	go func() {
		v, err := f()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		return none, context.Cause(ctx)
	}
}
