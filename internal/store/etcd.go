package store

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

// EtcdConfig says which etcd keeps the records, and how it is reached.
type EtcdConfig struct {
	Endpoints []string // HOST:PORT
	Prefix    string   // of the keys; nobody else writes below it
	// TLS: files in PEM. Without CA there is none, and then the endpoints are on this machine.
	CA, Cert, Key string
	// Lease is how long a leader that is gone is waited for; 0: LeaseTime. In whole seconds.
	Lease time.Duration
}

// LeaseTime is how long a leader leads that nobody hears from any more.
const LeaseTime = 4 * time.Second

// Times that etcd gets for an answer, and between two compactions of its own history, in which
// erased secrets are until then.
const (
	etcdPatience = 5 * time.Second
	compactEvery = 10 * time.Second // after a commit
)

// Etcd is a store in an etcd, version 3, for several processes of which one leads. It does
// not use etcd's revisions but counts its own, so that it does what the other stores do; all
// that it writes, it writes on condition that nobody else has written since.
//
// Keys below the prefix: meta is the revision, 8 bytes, big-endian. data/KEY is a record, with the revision
// of its commit in front, of the same form. history/REVISION, in 16 hexadecimal digits, is a JSON list of keys.
// leader/ has etcd's election.
type Etcd struct {
	client *clientv3.Client
	prefix string
	lease  time.Duration

	writing sync.Mutex // one commit of this process at a time

	mu      sync.Mutex
	fence   *fence
	compact *time.Timer // when etcd is to forget what records were; nil: nothing is to be forgotten
	last    int64       // etcd's revision of the last commit
}

// fence is the right to write: the key that a leader has in etcd while its lease lasts.
type fence struct {
	key     string
	created int64 // its CreateRevision
}

// ParseEtcd reads etcd://HOST:PORT,HOST:PORT[/PREFIX].
func ParseEtcd(text string) (EtcdConfig, error) {
	bad := func(format string, args ...any) (EtcdConfig, error) {
		return EtcdConfig{}, fmt.Errorf("%q: %w; expect etcd://HOST:PORT,HOST:PORT or etcd://HOST:PORT/PREFIX", text, fmt.Errorf(format, args...))
	}
	rest, ok := strings.CutPrefix(text, "etcd://")
	if !ok {
		return bad("it does not begin with etcd://")
	}
	hosts, prefix, _ := strings.Cut(rest, "/")
	c := EtcdConfig{Prefix: "waystamp"}
	if prefix != "" {
		c.Prefix = strings.TrimSuffix(prefix, "/")
	}
	if c.Prefix == "" || url.PathEscape(c.Prefix) != strings.ReplaceAll(c.Prefix, "/", "%2F") {
		return bad("%q is no prefix of keys", prefix)
	}
	for _, h := range strings.Split(hosts, ",") {
		host, port, err := net.SplitHostPort(h)
		if err != nil || host == "" || port == "" {
			return bad("%q is not HOST:PORT", h)
		}
		c.Endpoints = append(c.Endpoints, h)
	}
	return c, nil
}

// tls is what connections are protected with; nil: nothing.
func (c EtcdConfig) tls() (*tls.Config, error) {
	if c.CA == "" {
		if c.Cert != "" || c.Key != "" {
			return nil, errors.New("there is a certificate for etcd, and no CA to know etcd by; name that, too")
		}
		for _, e := range c.Endpoints {
			host, _, err := net.SplitHostPort(e)
			if a, parseErr := netip.ParseAddr(host); err != nil || host != "localhost" && (parseErr != nil || !a.IsLoopback()) {
				return nil, fmt.Errorf("%s is another machine, and the records have all secrets; give the CA of etcd's certificates, so that connections are encrypted", e)
			}
		}
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: x509.NewCertPool()}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, fmt.Errorf("read the CA of etcd: %w", err)
	}
	if !t.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("the CA of etcd, %s, has no certificate in PEM", c.CA)
	}
	if c.Cert != "" || c.Key != "" {
		cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, fmt.Errorf("read the certificate for etcd: %w", err)
		}
		t.Certificates = []tls.Certificate{cert}
	}
	return t, nil
}

// OpenEtcd connects, and waits for an answer.
func OpenEtcd(ctx context.Context, c EtcdConfig) (*Etcd, error) {
	at := strings.Join(c.Endpoints, ", ")
	t, err := c.tls()
	if err != nil {
		return nil, fmt.Errorf("open the store at %s: %w", at, err)
	}
	scheme := "http://"
	if t != nil {
		scheme = "https://"
	}
	var endpoints []string
	for _, e := range c.Endpoints {
		endpoints = append(endpoints, scheme+e)
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, TLS: t, Logger: zap.NewNop(), DialTimeout: etcdPatience,
		DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		MaxCallSendMsgSize: math.MaxInt32, MaxCallRecvMsgSize: math.MaxInt32, // the server has its own bounds
	})
	if err != nil {
		return nil, fmt.Errorf("open the store at %s: %w", at, err)
	}
	if c.Lease == 0 {
		c.Lease = LeaseTime
	}
	e := &Etcd{client: client, prefix: c.Prefix + "/", lease: c.Lease}
	if _, err := e.Snapshot(ctx, "none/"); err != nil {
		return nil, errors.Join(fmt.Errorf("open the store at %s: %w", at, err), client.Close())
	}
	return e, nil
}

// Close implements Store. Whoever leads gives that up.
func (e *Etcd) Close() error {
	e.mu.Lock()
	if e.compact != nil {
		e.compact.Stop()
	}
	e.mu.Unlock()
	if err := e.client.Close(); err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("close the store: %w", err)
	}
	return nil
}

func (e *Etcd) meta() string           { return e.prefix + "meta" }
func (e *Etcd) data(key string) string { return e.prefix + "data/" + key }
func (e *Etcd) history(revision uint64) string {
	return fmt.Sprintf("%shistory/%016x", e.prefix, revision)
}

// fails says what an error of etcd is to the caller.
func (e *Etcd) fails(ctx context.Context, did string, err error) error {
	switch {
	case e.client.Ctx().Err() != nil:
		return ErrClosed
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, rpctypes.ErrNoSpace):
		err = fmt.Errorf("%w; nothing changes until there is room: compact and defragment etcd, or raise its --quota-backend-bytes, then clear its alarm", err)
	case errors.Is(err, rpctypes.ErrTooManyOps):
		err = fmt.Errorf("%w: this change is of too many nodes at once; start etcd with a higher --max-txn-ops", err)
	case errors.Is(err, rpctypes.ErrRequestTooLarge):
		err = fmt.Errorf("%w: the domain is too large; start etcd with a higher --max-request-bytes", err)
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("etcd does not answer within %s", etcdPatience)
	}
	return &Failure{did, err}
}

// do is one transaction of etcd.
func (e *Etcd) do(ctx context.Context, did string, conditions []clientv3.Cmp, then, otherwise []clientv3.Op) (*clientv3.TxnResponse, error) {
	limited, cancel := context.WithTimeout(ctx, etcdPatience)
	defer cancel()
	r, err := e.client.Txn(limited).If(conditions...).Then(then...).Else(otherwise...).Commit()
	if err != nil {
		return nil, e.fails(ctx, did, err)
	}
	return r, nil
}

// revisionIn is the store's own in an answer about meta, and etcd's of that record.
func revisionIn(r *clientv3.TxnResponse, i int) (own uint64, etcd int64) {
	kvs := r.Responses[i].GetResponseRange().Kvs
	if len(kvs) == 0 || len(kvs[0].Value) != 8 {
		return 0, 0
	}
	return binary.BigEndian.Uint64(kvs[0].Value), kvs[0].ModRevision
}

// Snapshot implements Store.
func (e *Etcd) Snapshot(ctx context.Context, prefix string) (Snapshot, error) {
	r, err := e.do(ctx, "read", nil, []clientv3.Op{clientv3.OpGet(e.meta()), clientv3.OpGet(e.data(prefix), clientv3.WithPrefix())}, nil)
	if err != nil {
		return Snapshot{}, err
	}
	s := Snapshot{Records: map[string]Record{}}
	s.Revision, _ = revisionIn(r, 0)
	for _, kv := range r.Responses[1].GetResponseRange().Kvs {
		if len(kv.Value) < 8 {
			return Snapshot{}, fmt.Errorf("read the store: the record %s is damaged", kv.Key)
		}
		s.Records[strings.TrimPrefix(string(kv.Key), e.data(""))] = Record{Value: bytes.Clone(kv.Value[8:]), Revision: binary.BigEndian.Uint64(kv.Value)}
	}
	return s, nil
}

// Commit implements Store. A process that led once, and does not any more, commits nothing:
// ErrDeposed.
func (e *Etcd) Commit(ctx context.Context, t Txn) (uint64, error) {
	keys, err := t.keys()
	if err != nil {
		return 0, err
	}
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	list, err := json.Marshal(keys)
	if err != nil {
		return 0, err
	}
	e.mu.Lock()
	f := e.fence
	e.mu.Unlock()
	e.writing.Lock()
	defer e.writing.Unlock()
	for {
		at, err := e.holds(ctx, t.If)
		if err != nil {
			return 0, err
		}
		revision := at.own + 1
		head := binary.BigEndian.AppendUint64(nil, revision)
		conditions := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(e.meta()), "=", at.etcd)}
		ops := []clientv3.Op{clientv3.OpPut(e.meta(), string(head)), clientv3.OpPut(e.history(revision), string(list))}
		for k, v := range t.Put {
			ops = append(ops, clientv3.OpPut(e.data(k), string(head)+string(v)))
		}
		for _, k := range keys {
			if _, put := t.Put[k]; !put {
				ops = append(ops, clientv3.OpDelete(e.data(k)))
			}
		}
		if revision > HistoryMax {
			ops = append(ops, clientv3.OpDelete(e.history(revision-HistoryMax)))
		}
		var otherwise []clientv3.Op
		if f != nil {
			conditions = append(conditions, clientv3.Compare(clientv3.CreateRevision(f.key), "=", f.created))
			otherwise = []clientv3.Op{clientv3.OpGet(f.key)}
		}
		r, err := e.do(ctx, "write to", conditions, ops, otherwise)
		if err != nil {
			return 0, err
		}
		if r.Succeeded {
			e.tidy(r.Header.Revision)
			return revision, nil
		}
		if f != nil {
			if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != f.created {
				return 0, ErrDeposed
			}
		}
	}
}

// at is a state of the store, in its own revisions and in etcd's.
type at struct {
	own  uint64
	etcd int64
}

// holds reads the conditions of a transaction, and says at which state they hold.
func (e *Etcd) holds(ctx context.Context, conditions []Condition) (at, error) {
	ops := []clientv3.Op{clientv3.OpGet(e.meta())}
	for _, c := range conditions {
		ops = append(ops, clientv3.OpGet(e.data(c.Key)))
	}
	r, err := e.do(ctx, "read", nil, ops, nil)
	if err != nil {
		return at{}, err
	}
	var now at
	now.own, now.etcd = revisionIn(r, 0)
	for i, c := range conditions {
		have := uint64(0)
		if kvs := r.Responses[i+1].GetResponseRange().Kvs; len(kvs) > 0 && len(kvs[0].Value) >= 8 {
			have = binary.BigEndian.Uint64(kvs[0].Value)
		}
		if have != c.Revision {
			return at{}, fmt.Errorf("%s: %w", c.Key, ErrConflict)
		}
	}
	return now, nil
}

// tidy lets etcd forget what records were, in a while: until then it keeps secrets that were
// erased. Others who use this etcd lose their history, too.
func (e *Etcd) tidy(revision int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last = revision
	if e.compact != nil {
		return
	}
	e.compact = time.AfterFunc(compactEvery, func() {
		e.mu.Lock()
		last := e.last
		e.compact = nil
		e.mu.Unlock()
		ctx, cancel := context.WithTimeout(e.client.Ctx(), etcdPatience)
		defer cancel()
		_, err := e.client.Compact(ctx, last)
		if err == nil || errors.Is(err, rpctypes.ErrCompacted) || e.client.Ctx().Err() != nil {
			return
		}
		e.tidy(last)
	})
}

// Watch implements Store.
func (e *Etcd) Watch(ctx context.Context, prefix string, after uint64, f func(Commit) error) error {
	for {
		err := e.watchOnce(ctx, prefix, &after, f)
		if err != nil {
			return err
		}
		select { // etcd was away
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-e.client.Ctx().Done():
			return ErrClosed
		case <-time.After(failurePause):
		}
	}
}

// failurePause is between two tries to watch.
const failurePause = 200 * time.Millisecond

// watchOnce ends without an error if etcd ends the watch.
func (e *Etcd) watchOnce(ctx context.Context, prefix string, after *uint64, f func(Commit) error) error {
	watching, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	changes := e.client.Watch(watching, e.meta(), clientv3.WithCreatedNotify())
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-e.client.Ctx().Done():
			return ErrClosed
		case r, ok := <-changes:
			if e.client.Ctx().Err() != nil {
				return ErrClosed
			}
			if !ok || r.Err() != nil {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				return nil
			}
		}
		commits, last, err := e.since(ctx, prefix, *after)
		if err != nil {
			return err
		}
		for _, c := range commits {
			if err := f(c); err != nil {
				return err
			}
		}
		*after = last
	}
}

// since is the history behind a revision, and where it ends.
func (e *Etcd) since(ctx context.Context, prefix string, after uint64) (commits []Commit, last uint64, err error) {
	r, err := e.do(ctx, "watch", nil, []clientv3.Op{
		clientv3.OpGet(e.meta()), clientv3.OpGet(e.history(after+1), clientv3.WithRange(clientv3.GetPrefixRangeEnd(e.prefix+"history/"))),
	}, nil)
	if err != nil {
		return nil, 0, err
	}
	last, _ = revisionIn(r, 0)
	if last > after+HistoryMax {
		return nil, 0, ErrCompacted
	}
	for _, kv := range r.Responses[1].GetResponseRange().Kvs {
		var keys []string
		revision, err := strconv.ParseUint(strings.TrimPrefix(string(kv.Key), e.prefix+"history/"), 16, 64)
		if err == nil {
			err = json.Unmarshal(kv.Value, &keys)
		}
		if err != nil {
			return nil, 0, fmt.Errorf("watch the store: its history is damaged: %w", err)
		}
		keys = slices.DeleteFunc(keys, func(k string) bool { return !strings.HasPrefix(k, prefix) })
		if len(keys) > 0 {
			commits = append(commits, Commit{Revision: revision, Keys: keys})
		}
	}
	return commits, max(last, after), nil
}

// Lead implements Shared.
func (e *Etcd) Lead(ctx context.Context, self string) (Leadership, error) {
	limited, cancelGrant := context.WithTimeout(ctx, etcdPatience)
	defer cancelGrant()
	lease, err := e.client.Grant(limited, int64(e.lease/time.Second))
	if err != nil {
		return Leadership{}, e.fails(ctx, "lead with", err)
	}
	session, err := concurrency.NewSession(e.client, concurrency.WithLease(lease.ID))
	if err != nil {
		return Leadership{}, e.fails(ctx, "lead with", err)
	}
	election := concurrency.NewElection(session, e.prefix+"leader")
	campaign, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(session.Ctx(), func() { cancel(errLeaseEnded) })
	defer stop()
	done := make(chan error, 1)
	go func() { done <- election.Campaign(campaign, self) }()
	select {
	case err = <-done:
	case <-campaign.Done(): // without an answer of etcd Campaign ends with the client, and not before
		err = context.Cause(campaign)
	}
	if err != nil {
		return Leadership{}, errors.Join(e.fails(ctx, "lead with", err), endSession(session))
	}
	// Those before it are gone; its own key may be, too.
	r, err := e.do(ctx, "lead with", []clientv3.Cmp{clientv3.Compare(clientv3.CreateRevision(election.Key()), "=", election.Rev())},
		[]clientv3.Op{clientv3.OpGet(e.meta(), clientv3.WithKeysOnly())}, nil)
	if err == nil && !r.Succeeded {
		err = e.fails(ctx, "lead with", errLeaseEnded)
	}
	if err != nil {
		return Leadership{}, errors.Join(err, endSession(session))
	}
	e.tidy(r.Header.Revision) // the one before had no time to, perhaps
	e.mu.Lock()
	e.fence = &fence{election.Key(), election.Rev()}
	e.mu.Unlock()
	return Leadership{Lost: session.Done(), Resign: func() error { return endSession(session) }}, nil
}

// errLeaseEnded means that etcd has not heard from this process for too long.
var errLeaseEnded = errors.New("the lease has ended during the election")

// endSession gives up what a lease holds. Without an answer it ends by itself.
func endSession(s *concurrency.Session) error {
	s.Orphan()
	ctx, cancel := context.WithTimeout(context.Background(), etcdPatience)
	defer cancel()
	if _, err := s.Client().Revoke(ctx, s.Lease()); err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return fmt.Errorf("give up the lease in the store: %w", err)
	}
	return nil
}

// Leader implements Shared.
func (e *Etcd) Leader(ctx context.Context) (string, error) {
	r, err := e.do(ctx, "read", nil, []clientv3.Op{clientv3.OpGet(e.prefix+"leader/", clientv3.WithFirstCreate()...)}, nil)
	if err != nil {
		return "", err
	}
	if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
		return string(kvs[0].Value), nil
	}
	return "", ErrNoLeader
}
