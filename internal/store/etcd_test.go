package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/client/v3"

	"github.com/waystamp/waystamp/internal/await"
)

// patience is for what must come.
var patience = await.Limit(time.Minute)

func openEtcd(t *testing.T, dir string) *Etcd {
	t.Helper()
	e, err := OpenEtcd(t.Context(), etcdOf(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	return e
}

func lead(t *testing.T, e *Etcd, self string) Leadership {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	l, err := e.Lead(ctx, self)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestOneLeadsAndTheNextWhenItResigns(t *testing.T) {
	dir := t.TempDir()
	a, b := openEtcd(t, dir), openEtcd(t, dir)
	if _, err := b.Leader(t.Context()); !errors.Is(err, ErrNoLeader) {
		t.Errorf("at first: %v", err)
	}
	first := lead(t, a, "a")
	next := make(chan Leadership)
	go func() {
		l, err := b.Lead(context.Background(), "b")
		if err != nil {
			t.Error(err)
		}
		next <- l
	}()
	for _, e := range []*Etcd{a, b} {
		if who, err := e.Leader(t.Context()); err != nil || who != "a" {
			t.Errorf("the leader is %q, %v", who, err)
		}
	}
	commit(t, a, Txn{Put: put("k", "1")})
	if err := first.Resign(); err != nil {
		t.Error(err)
	}
	second := <-next
	<-first.Lost
	if who, err := a.Leader(t.Context()); err != nil || who != "b" {
		t.Errorf("the leader is %q, %v", who, err)
	}
	// It has what it read, and wants to write.
	if _, err := a.Commit(t.Context(), Txn{If: []Condition{{"k", 1}}, Put: put("k", "2")}); !errors.Is(err, ErrDeposed) {
		t.Errorf("one that leads no more: %v", err)
	}
	if r := commit(t, b, Txn{If: []Condition{{"k", 1}}, Put: put("k", "3")}); r != 2 {
		t.Errorf("revision %d, want 2: what was refused has none", r)
	}
	if err := second.Resign(); err != nil {
		t.Error(err)
	}
	again := lead(t, a, "a")
	commit(t, a, Txn{Put: put("k", "4")})
	if err := again.Resign(); err != nil {
		t.Error(err)
	}
}

// A leader that is cut off does not know it: its lease ends all the same, and what it writes afterwards
// is refused.
func TestALeaderWhoseLeaseHasEndedWritesNothing(t *testing.T) {
	dir := t.TempDir()
	a, b := openEtcd(t, dir), openEtcd(t, dir)
	l := lead(t, a, "a")
	a.mu.Lock()
	f := *a.fence
	a.mu.Unlock()
	// Somebody takes its key: its session is as alive as before.
	if _, err := b.client.Delete(t.Context(), f.key); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Commit(t.Context(), Txn{Put: put("k", "1")}); !errors.Is(err, ErrDeposed) {
		t.Errorf("without its key: %v", err)
	}
	if _, err := a.client.Put(t.Context(), f.key, "a"); err != nil { // another of the same name
		t.Fatal(err)
	}
	if _, err := a.Commit(t.Context(), Txn{Put: put("k", "1")}); !errors.Is(err, ErrDeposed) {
		t.Errorf("with another key of that name: %v", err)
	}
	if n := len(snapshot(t, b, "").Records); n != 0 {
		t.Errorf("%d records were written", n)
	}
	if err := l.Resign(); err != nil {
		t.Error(err)
	}
}

func TestALeaderThatIsGoneIsFollowedWhenItsLeaseEnds(t *testing.T) {
	dir := t.TempDir()
	a, b := openEtcd(t, dir), openEtcd(t, dir)
	l := lead(t, a, "a")
	if err := a.Close(); err != nil { // it resigns no more
		t.Error(err)
	}
	<-l.Lost
	second := lead(t, b, "b")
	commit(t, b, Txn{Put: put("k", "1")})
	if err := second.Resign(); err != nil {
		t.Error(err)
	}
}

// One whose own key is gone when those before it are does not lead.
func TestAKeyThatIsGoneWinsNoElection(t *testing.T) {
	dir := t.TempDir()
	a, b := openEtcd(t, dir), openEtcd(t, dir)
	first := lead(t, a, "a")
	ended := make(chan error)
	go func() {
		l, err := b.Lead(context.Background(), "b")
		if err == nil {
			l.Resign()
		}
		ended <- err
	}()
	stands(t, a, "b")
	own, err := a.client.Get(t.Context(), a.prefix+"leader/", clientv3.WithLastCreate()...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.client.Delete(t.Context(), string(own.Kvs[0].Key)); err != nil {
		t.Fatal(err)
	}
	if err := first.Resign(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, errLeaseEnded) {
		t.Errorf("it leads without its key: %v", err)
	}
}

// stands waits until a process is the last that wants to lead.
func stands(t *testing.T, e *Etcd, who string) {
	t.Helper()
	for limit := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // nothing tells of it
		r, err := e.client.Get(t.Context(), e.prefix+"leader/", clientv3.WithLastCreate()...)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Kvs) > 0 && string(r.Kvs[0].Value) == who {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("%s does not want to lead", who)
		}
	}
}

// A process that waits for its turn can be ended while etcd does not answer.
func TestWhoeverWaitsToLeadEndsWithoutEtcd(t *testing.T) {
	c := etcdOf(t, t.TempDir())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to := c.Endpoints[0]
	var group sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	group.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp", to)
			if err != nil {
				near.Close()
				continue
			}
			mu.Lock()
			conns = append(conns, near, far)
			mu.Unlock()
			for _, pair := range [][2]net.Conn{{near, far}, {far, near}} {
				group.Go(func() {
					io.Copy(pair[0], pair[1])
					pair[0].Close()
				})
			}
		}
	})
	cut := sync.OnceFunc(func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			c.Close()
		}
	})
	t.Cleanup(func() {
		cut()
		group.Wait()
	})
	a, err := OpenEtcd(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	first := lead(t, a, "a")
	defer first.Resign()
	c.Endpoints = []string{l.Addr().String()}
	b, err := OpenEtcd(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := b.Lead(ctx, "b")
		ended <- err
	}()
	stands(t, a, "b")
	cut()
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("it has not ended")
	}
}

// Processes that write at once take turns: each commit has a revision of its own, and none is lost.
func TestSeveralProcessesLoseNoWrite(t *testing.T) {
	dir := t.TempDir()
	const writers, times = 3, 20
	var group sync.WaitGroup
	revisions := make(chan uint64, writers*times)
	for i := range writers {
		e := openEtcd(t, dir)
		group.Go(func() {
			for n := range times {
				r, err := e.Commit(context.Background(), Txn{Put: put(fmt.Sprint(i, "/", n), "")})
				if err != nil {
					t.Error(err)
				}
				revisions <- r
			}
		})
	}
	group.Wait()
	close(revisions)
	seen := map[uint64]bool{}
	for r := range revisions {
		seen[r] = true
	}
	snap := snapshot(t, openEtcd(t, dir), "")
	if len(seen) != writers*times || snap.Revision != writers*times || len(snap.Records) != writers*times {
		t.Errorf("%d commits have %d revisions, the last %d, and left %d records", writers*times, len(seen), snap.Revision, len(snap.Records))
	}
}

// An erased secret is in no history of etcd's.
func TestEtcdForgetsWhatWasErased(t *testing.T) {
	dir := t.TempDir()
	e := openEtcd(t, dir)
	commit(t, e, Txn{Put: put("k", "secret")})
	before, err := e.client.Get(t.Context(), e.data("k"))
	if err != nil {
		t.Fatal(err)
	}
	commit(t, e, Txn{Delete: []string{"k"}})
	// It ends before it has seen to that. Whoever leads next does.
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	e = openEtcd(t, dir)
	defer lead(t, e, "e").Resign()
	e.mu.Lock()
	due := e.compact != nil
	if due {
		e.compact.Reset(0)
	}
	e.mu.Unlock()
	if !due {
		t.Fatal("nothing is to be forgotten")
	}
	for limit := time.Now().Add(patience); ; time.Sleep(time.Millisecond) { // nothing tells of it
		old, err := e.client.Get(t.Context(), e.data("k"), clientv3.WithRev(before.Header.Revision))
		if err != nil {
			if !strings.Contains(err.Error(), "compacted") {
				t.Error(err)
			}
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("etcd still knows %q", old.Kvs[0].Value)
		}
	}
}

func TestAnAddressOfEtcdIsReadOrRefused(t *testing.T) {
	for text, want := range map[string]string{
		"etcd://127.0.0.1:2379":                 "127.0.0.1:2379 waystamp",
		"etcd://[::1]:2379,localhost:2380/a/b/": "[::1]:2379 localhost:2380 a/b",
		"http://127.0.0.1:2379":                 "",
		"etcd://":                               "",
		"etcd://host":                           "",
		"etcd://127.0.0.1:2379,":                "",
		"etcd://127.0.0.1:2379/a b":             "",
	} {
		c, err := ParseEtcd(text)
		if want == "" {
			if err == nil || !strings.Contains(err.Error(), "expect etcd://") {
				t.Errorf("%s: %+v, %v", text, c, err)
			}
			continue
		}
		if got := strings.Join(append(c.Endpoints, c.Prefix), " "); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", text, got, err, want)
		}
	}
}

// The records have all secrets.
func TestNoConnectionToAnotherMachineIsInTheClear(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, c := range map[string]EtcdConfig{
		"192.0.2.1:2379 is another machine": {Endpoints: []string{"127.0.0.1:2379", "192.0.2.1:2379"}},
		"etcd.example:2379 is another":      {Endpoints: []string{"etcd.example:2379"}},
		"no CA to know etcd by":             {Endpoints: []string{"127.0.0.1:2379"}, Cert: "c", Key: "k"},
		"no such file":                      {Endpoints: []string{"192.0.2.1:2379"}, CA: file + ".none"},
		"has no certificate in PEM":         {Endpoints: []string{"192.0.2.1:2379"}, CA: file},
	} {
		if _, err := OpenEtcd(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	if c, err := (EtcdConfig{Endpoints: []string{"127.0.0.1:1", "[::1]:1", "localhost:1"}}).tls(); c != nil || err != nil {
		t.Errorf("this machine: %v", err)
	}
}
