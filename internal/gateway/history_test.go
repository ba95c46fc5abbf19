package gateway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func logOf(t *testing.T, list ...Record) *os.File {
	t.Helper()
	name := filepath.Join(t.TempDir(), "audit.log")
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	a, err := OpenAudit(name, func() time.Time { at = at.Add(time.Second); return at })
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list {
		if err := a.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// A session's requests are found by its number, whatever is between; of two sessions with a number the last one counts.
func TestASessionIsReadFromTheLog(t *testing.T) {
	open := func(id uint64, who string) Record { return Record{Event: EventOpened, Session: id, Identity: who} }
	decided := func(id, n uint64, path, chain string) Record {
		return Record{Event: EventDecided, Session: id, Request: n, Path: path, Chain: chain, Rule: 1}
	}
	ended := func(id, n uint64, status int) Record {
		return Record{Event: EventEnded, Session: id, Request: n, Status: status}
	}
	log := func() *os.File {
		return logOf(t,
			decided(7, 9, "/before", "deep"), // its beginning is in another file
			open(7, "old"), decided(7, 1, "/old", "deep"),
			open(7, "alice"), open(77, "bob"),
			decided(7, 1, "/a", "light"), decided(77, 1, "/b", "deep"), decided(7, 2, `/"session":77,`, "deep"),
			ended(77, 1, 500), ended(7, 2, 201),
			Record{Event: EventRefused, Session: 7, Path: "/no", Reason: RuleNone},
			ended(7, 1, 200), decided(7, 3, "/late", "deep"),
			Record{Event: EventClosed, Session: 7, Reason: SessionEnded},
		)
	}
	h, ok, err := ReadSession(t.Context(), log(), 7, 10)
	if err != nil || !ok || h.Opened.Identity != "alice" || h.Closed == nil || h.Closed.Reason != SessionEnded || h.Omitted != 0 {
		t.Fatalf("%+v, %t, %v", h, ok, err)
	}
	var got []string
	for _, r := range h.Requests {
		text := fmt.Sprintf("%d %s %s %s", r.Decided.Request, r.Decided.Path, r.Decided.Chain, r.Decided.Reason)
		if r.Ended != nil {
			text += fmt.Sprint(r.Ended.Status)
		}
		got = append(got, text)
	}
	want := []string{"1 /a light 200", `2 /"session":77, deep 201`, "0 /no  rule-none", "3 /late deep "}
	if strings.Join(got, "; ") != strings.Join(want, "; ") {
		t.Errorf("its requests are %q; want %q", got, want)
	}
	if h, ok, err := ReadSession(t.Context(), log(), 77, 10); err != nil || !ok || len(h.Requests) != 1 || h.Closed != nil || h.Requests[0].Ended.Status != 500 {
		t.Errorf("session 77: %+v, %t, %v", h, ok, err)
	}
	if _, ok, err := ReadSession(t.Context(), log(), 8, 10); ok || err != nil {
		t.Errorf("a session that is not there: %t, %v", ok, err)
	}
}

// The last requests are kept, with their ends, and the others counted.
func TestALongSessionIsShortened(t *testing.T) {
	const all, most = 100, 7
	list := []Record{{Event: EventOpened, Session: 1}}
	for n := uint64(1); n <= all; n++ {
		list = append(list, Record{Event: EventDecided, Session: 1, Request: n, Path: fmt.Sprint("/", n)})
		if n > 30 { // the end of each comes late
			list = append(list, Record{Event: EventEnded, Session: 1, Request: n - 30, Status: int(n - 30)})
		}
	}
	for n := uint64(all - 29); n <= all; n++ {
		list = append(list, Record{Event: EventEnded, Session: 1, Request: n, Status: int(n)})
	}
	h, ok, err := ReadSession(t.Context(), logOf(t, list...), 1, most)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	h.Shorten(most)
	if len(h.Requests) != most || h.Omitted != all-most {
		t.Errorf("%d requests, and %d before; want %d and %d", len(h.Requests), h.Omitted, most, all-most)
	}
	for i, r := range h.Requests {
		want := uint64(all - most + 1 + i)
		if r.Decided.Request != want || r.Ended == nil || r.Ended.Status != int(want) {
			t.Errorf("request %d is %+v, %+v; want number %d", i, r.Decided, r.Ended, want)
		}
	}
}

func TestReadingASessionCanBeBrokenOff(t *testing.T) {
	list := []Record{}
	for range 3000 {
		list = append(list, Record{Event: EventOpened, Session: 1})
	}
	why := errors.New("nobody waits")
	ctx, stop := context.WithCancelCause(t.Context())
	stop(why)
	if _, _, err := ReadSession(ctx, logOf(t, list...), 1, 1); !errors.Is(err, why) {
		t.Errorf("%v; want %v", err, why)
	}
}
