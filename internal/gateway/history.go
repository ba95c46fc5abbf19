package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// SessionHistory is what an audit log has of a session.
type SessionHistory struct {
	Opened   Record
	Closed   *Record          // nil: the log has no end of it
	Requests []SessionRequest // as they were decided, with what was refused between; the last ones, if there are more than were asked for
	Omitted  int              // earlier ones
}

// SessionRequest is a request of a session, or a connection of a service that is not HTTP.
type SessionRequest struct {
	Decided Record  // or refused
	Ended   *Record // nil: it was refused, or the log has no end of it
}

// ReadSession finds the last session of a number in an audit log: each process of a gateway counts from 1. ok is false if there is none.
// The log is not verified; a line that is not whole yet is left out.
func ReadSession(ctx context.Context, log io.Reader, id uint64, most int) (h SessionHistory, ok bool, err error) {
	// Lines have this member as the log writes them; what else has it, or begins so, the record tells.
	of := fmt.Appendf(nil, `"session":%d`, id)
	at := map[uint64]int{} // in h.Requests, by the request's number
	b := bufio.NewReaderSize(log, auditLineMax+1)
	for n := uint64(1); ; n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return h, false, context.Cause(ctx)
		}
		line, err := b.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return h, ok, nil
		case err != nil:
			return h, false, fmt.Errorf("read line %d of the audit log: %w", n, err)
		case !bytes.Contains(line, of):
			continue
		}
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			return h, false, fmt.Errorf("line %d of the audit log is not a record: %w", n, err)
		}
		if r.Session != id {
			continue
		}
		if r.Event == EventOpened {
			h, ok = SessionHistory{Opened: r}, true
			clear(at)
			continue
		}
		if !ok {
			continue // its beginning is in another file
		}
		switch r.Event {
		case EventClosed:
			h.Closed = &r
		case EventEnded:
			if i, known := at[r.Request]; known && i >= h.Omitted {
				h.Requests[i-h.Omitted].Ended = &r
			}
			delete(at, r.Request)
		case EventDecided, EventRefused:
			if r.Event == EventDecided {
				at[r.Request] = h.Omitted + len(h.Requests)
			}
			h.Requests = append(h.Requests, SessionRequest{Decided: r})
			if len(h.Requests) > 2*most {
				drop := len(h.Requests) - most
				h.Requests = append([]SessionRequest(nil), h.Requests[drop:]...)
				h.Omitted += drop
			}
		}
	}
}

// Shorten leaves the last requests.
func (h *SessionHistory) Shorten(most int) {
	if drop := len(h.Requests) - most; drop > 0 {
		h.Requests, h.Omitted = h.Requests[drop:], h.Omitted+drop
	}
}

// Until is when the session ended; zero: the log has no end of it.
func (h SessionHistory) Until() (at time.Time) {
	if h.Closed != nil {
		at = h.Closed.Time
	}
	return at
}
