package agent

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/planfile"
	"github.com/waystamp/waystamp/internal/stream"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// streamPlaces has the operations on the machine for functions of kind stream.
type streamPlaces interface {
	// Start makes a function's place, with its interface on the node, and a worker in it.
	// ends answers for the keys of sealed connections; nil: there are none. refused is told of connections that the worker refuses.
	Start(p plan.Proxy, config []byte, ends func(stream.Ask) (*stream.Ends, error), refused func(stream.Refusal)) (streamWorker, error)
	// StartGateway does so for the node's gateway.
	StartGateway(p plan.Proxy, s gatewayStart) (gatewayWorker, error)
	// RemoveStrays removes interfaces that an earlier agent of the instance has left, except
	// these.
	RemoveStrays(keep []string) error
	// Draining are a function's workers that take no more connections, the oldest first.
	Draining(function string) []api.StreamDrain
	// Leave lets go of those workers.
	Leave() error
}

// streamWorker is a worker in its place.
type streamWorker interface {
	// Serve is called once the plan in force has the function. Until then a worker that was there before takes the connections;
	// after Close it goes on as if nothing had been.
	Serve() error
	Ended() <-chan struct{}
	Err() error // why; only then
	// Whole gives an error if the place lacks an interface that it has had.
	Whole() error
	PID() int
	Statistics() stream.Statistics
	// Sockets are the sockets in its place that have these ends, one for each.
	Sockets(ends []host.TCPEnds) ([]host.TCPSocket, error)
	Close() error // and removes the place
	// Leave lets go of it: worker and place stay for the next agent of the instance. A gateway's do not.
	Leave() error
	// Adopted says whether an agent before has started it.
	Adopted() bool
}

// kernelStreams has a namespace without a name for each function, which ends with its
// worker.
type kernelStreams struct {
	node     *host.Net
	instance string
	runDir   string // has a socket of each worker, by which the next agent finds it
	log      *slog.Logger
	records  *workerRecords
}

func newKernelStreams(node *host.Net, instance, runDir string, log *slog.Logger) kernelStreams {
	return kernelStreams{node, instance, runDir, log, newWorkerRecords(runDir, log)}
}

// socket is where the worker behind an interface listens.
func (k kernelStreams) socket(link string) string { return filepath.Join(k.runDir, link+".sock") }

// alias marks an instance's interfaces.
func (k kernelStreams) alias() string { return "waystamp stream " + k.instance }

func (k kernelStreams) RemoveStrays(keep []string) error {
	links, err := k.node.Links()
	if err != nil {
		return err
	}
	var errs []error
	for _, l := range links {
		if l.Alias != k.alias() || slices.Contains(keep, l.Name) {
			continue
		}
		// The worker behind it ends with it.
		if err := k.node.DeleteLink(l.Name); !errors.Is(err, host.ErrNoLink) {
			errs = append(errs, err)
		}
	}
	sockets, err := filepath.Glob(k.socket(model.StreamLinkPrefix+"*") + "*")
	errs = append(errs, err)
	for _, s := range sockets {
		if !slices.ContainsFunc(keep, func(link string) bool { return k.socket(link) == s || k.socket(link)+socketNext == s }) {
			errs = append(errs, removeSocket(s))
		}
	}
	// One that does not end with its interface.
	errs = append(errs, k.records.endAll(func(link string) bool { return !slices.Contains(keep, link) }, k.node.NetNS()))
	return errors.Join(errs...)
}

// endBefore ends what is left of workers behind an interface: they do not hand themselves over, or drain.
func (k kernelStreams) endBefore(link string) error {
	return k.records.endAll(func(l string) bool { return l == link }, k.node.NetNS())
}

func (k kernelStreams) Draining(function string) (out []api.StreamDrain) {
	for _, d := range k.records.of(function) {
		o := api.StreamDrain{Worker: d.PID, Seconds: d.Until - min(sinceBoot(), d.Until)}
		if d.counts {
			now := d.process.Statistics().Now
			o.Now = &now
		}
		out = append(out, o)
	}
	return out
}

func (k kernelStreams) Leave() error { return k.records.leave() }

// socketNext is behind the name of the socket of a worker that is to take another's place.
const socketNext = ".next"

func removeSocket(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the socket of a worker: %w", err)
	}
	return nil
}

// The interface and the port in a worker's namespace.
const (
	streamLink = "waystamp"
	streamPort = 8080 // of its listeners; the program directs all other ports to them
	// A worker that takes another one's place has the next port: on the same the kernel would give connections to both.
	// One that drains has its own for seconds; there are more than workers could be replaced in these.
	streamPorts = 16
	// Frames of a super-packet: more are refused behind the interface.
	streamFrames = 63
)

var streamGateway = netip.MustParseAddr("fe80::1")

// workerTag says what a worker is, to the next agent. The worker keeps it.
type workerTag struct {
	Program  string         `json:"program"`  // that runs; see thisProgram
	Config   string         `json:"config"`   // digest of its configuration
	MTU      int            `json:"mtu"`      // of its interface
	Port     uint16         `json:"port"`     // of its listeners
	Attached model.Attached `json:"attached"` // the function that plain connections go through
	Indexes  []int          `json:"indexes"`  // of that function's interfaces, when they were taken over
}

// thisProgram tells the program that runs from others: each file that is installed is another one.
func thisProgram() (string, error) {
	st, err := os.Stat("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("look at the running program: %w", err)
	}
	file := st.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d %d %d %d", file.Dev, file.Ino, st.Size(), st.ModTime().UnixNano()), nil
}

// Start takes a worker over that runs already, if it runs this program with this configuration. If it
// runs another program, or has another configuration, a new one takes its place with Serve, and it goes on with the connections that it has.
// Else the place is made anew, and a worker that was there ends.
func (k kernelStreams) Start(p plan.Proxy, config []byte, ends func(stream.Ask) (*stream.Ends, error), refused func(stream.Refusal)) (_ streamWorker, err error) {
	program, err := thisProgram()
	if err != nil {
		return nil, err
	}
	tag := workerTag{Program: program, Config: digest(config), MTU: p.Stream.MTU, Port: streamPort, Attached: p.Stream.Attached}
	w, found, was, err := k.find(p.To)
	switch {
	case err != nil:
	case tag.MTU != was.MTU || tag.Attached != was.Attached:
	case tag.Program == was.Program && tag.Config == was.Config:
		w.function, w.ends, w.refused, w.adopted = p.Function, ends, refused, true
		w.Process, err = found.Take(config)
		if err == nil {
			return w, nil
		}
	case tag.Attached == model.Attached{}: // of two behind a function's interfaces, one would have them
		tag.Port = streamPort + (was.Port-streamPort+1)%streamPorts
		w.function, w.ends, w.refused, w.instead, w.sameWords = p.Function, ends, refused, found, tag.Program == was.Program
		if err = k.run(w, p, tag, config); err == nil {
			return w, nil
		}
		w.instead = nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		k.log.Warn("a worker that runs cannot be taken over; it ends, and its connections are reset", "function", p.Function, "err", err)
	}
	if found != nil {
		err = errors.Join(k.end(found), found.Leave())
	} else {
		err = nil
	}
	if w != nil {
		err = errors.Join(err, w.letGo())
	}
	// Also one that cannot be spoken with, and those that drain: the place is made anew.
	if err := errors.Join(err, k.endBefore(p.To)); err != nil {
		return nil, err
	}
	ns, err := host.Anonymous()
	if err != nil {
		return nil, err
	}
	tag.Port = streamPort
	w = k.worker(p.To)
	w.ns, w.function, w.ends, w.refused = ns, p.Function, ends, refused
	if err := w.place(p.To, p.Stream.MTU); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	if err := k.run(w, p, tag, config); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

func (k kernelStreams) worker(link string) *kernelWorker {
	return &kernelWorker{node: k.node, link: link, alias: k.alias(), socket: k.socket(link), records: k.records, log: k.log}
}

// end ends a worker that was found, and gives back the interfaces of its function.
func (k kernelStreams) end(found *stream.Found) error {
	handle, err := found.Handle()
	if handle == nil || err != nil {
		return err
	}
	if err := errors.Join(endWorker(found.PID(), handle, k.node.NetNS()), handle.Close()); err != nil {
		return err
	}
	k.records.ended(found.PID())
	return nil
}

// find looks for the worker behind an interface. The error is fs.ErrNotExist if there is none. With another error found may be
// there: a worker that cannot be taken over.
func (k kernelStreams) find(link string) (w *kernelWorker, found *stream.Found, was workerTag, err error) {
	found, err = stream.Find(k.socket(link))
	if err != nil {
		return nil, found, was, err
	}
	w = k.worker(link)
	w.made = true
	files := found.Files
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			err = errors.Join(fmt.Errorf("process %d: %w", found.PID(), err), w.letGo())
			w = nil
		}
	}()
	if err := json.Unmarshal(found.Tag, &was); err != nil {
		return w, found, was, fmt.Errorf("what it says of itself: %w", err)
	}
	for _, ns := range []**host.NetNS{&w.ns, &w.behind} {
		if len(files) == 0 {
			break
		}
		f := files[0]
		files = files[1:]
		if *ns, err = host.FromFile(f); err != nil {
			return w, found, was, err
		}
	}
	if w.ns == nil {
		return w, found, was, errors.New("it does not hand over its namespace")
	}
	switch l, err := w.node.Link(link); {
	case err != nil:
		return w, found, was, err
	case l.Alias != w.alias:
		return w, found, was, fmt.Errorf("interface %s is not waystamp's", link)
	}
	place, err := host.Open(w.ns)
	if err != nil {
		return w, found, was, err
	}
	defer func() { err = errors.Join(err, place.Close()) }()
	l, err := place.Link(streamLink)
	if err != nil {
		return w, found, was, err
	}
	if _, mac := streamMACs(link); l.MAC != mac {
		return w, found, was, fmt.Errorf("its interface is not that behind %s", link)
	}
	w.inside = l.Index
	if a := was.Attached; a != (model.Attached{}) {
		if w.behind == nil || len(was.Indexes) != 2 {
			return w, found, was, errors.New("it does not say where its function is")
		}
		w.taken = []takenOver{{w.ns, plainTo, a.To, was.Indexes[0]}, {w.behind, plainFrom, a.From, was.Indexes[1]}}
	}
	return w, found, was, nil
}

// workerMemory is how many bytes a worker may have: a quarter of the machine's.
func workerMemory() (uint64, error) {
	var s unix.Sysinfo_t
	if err := unix.Sysinfo(&s); err != nil {
		return 0, os.NewSyscallError("sysinfo", err)
	}
	return max(stream.MemoryMin, uint64(s.Totalram)*uint64(s.Unit)/4), nil
}

// run starts a worker in its place, which is made. If it is to be there instead of another one, it takes no connection before Serve.
func (k kernelStreams) run(w *kernelWorker, p plan.Proxy, tag workerTag, config []byte) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the program of workers: %w", err)
	}
	memory, err := workerMemory()
	if err != nil {
		return err
	}
	if config, err = stream.Placed(config, tag.Port, memory); err != nil {
		return err
	}
	var files []*os.File // the worker's, from now on
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	keep := func(f *os.File, err error) (*os.File, error) {
		if err == nil {
			files = append(files, f)
		}
		return f, err
	}
	o := stream.Options{NS: w.ns, Program: self, Config: config, Stay: &stream.Stay{}}
	if !p.Stream.Early {
		if o.Held, err = keep(w.packets("that SYNs wait at", stream.HeldSocket)); err != nil {
			return err
		}
	}
	if o.Stay.Link, err = keep(w.packets("by which a worker notices its interface's end", stream.LinkSocket)); err != nil {
		return err
	}
	if o.Stay.At, err = keep(stream.StaySocket(w.socket + socketNext)); err != nil {
		return err
	}
	if a := p.Stream.Attached; a != (model.Attached{}) {
		if o.Through, err = w.attach(a); err != nil {
			return err
		}
		files = append(files, o.Through...)
		for _, t := range w.taken {
			tag.Indexes = append(tag.Indexes, t.index)
		}
	}
	var listeners []*os.File
	if w.Process, listeners, err = stream.Begin(o); err != nil {
		return err
	}
	files = append(files, listeners...)
	defer func() {
		if err != nil {
			err = errors.Join(err, w.stop())
		}
	}()
	if err := k.records.started(p.Function, w.link, w.PID()); err != nil {
		return err
	}
	// Of two programs the first counts, so that nothing changes before that of the worker before is gone.
	if w.listeners, err = dataplane.GiveConnections(w.ns, w.inside, listeners); err != nil {
		return err
	}
	if w.tag, err = json.Marshal(tag); err != nil || w.instead != nil {
		return err
	}
	return w.release()
}

// release lets the worker take connections, and leaves its program to it.
func (w *kernelWorker) release() (err error) {
	if err := os.Rename(w.socket+socketNext, w.socket); err != nil {
		return fmt.Errorf("name a worker's socket: %w", err)
	}
	var files []*os.File
	defer func() {
		for _, f := range files {
			err = errors.Join(err, f.Close())
		}
	}()
	link, err := w.listeners.File()
	if err != nil {
		return err
	}
	files = append(files, link)
	for _, ns := range []*host.NetNS{w.ns, w.behind} {
		if ns != nil {
			f, err := ns.File()
			if err != nil {
				return err
			}
			files = append(files, f)
		}
	}
	if err := w.Release(w.tag, link, files[1:]...); err != nil {
		return err
	}
	err = w.listeners.Close() // the worker holds it
	w.listeners = nil
	return err
}

// Serve has the worker take the place of the one before, if there is one, and answers what it asks.
func (w *kernelWorker) Serve() error {
	if found := w.instead; found != nil {
		w.instead = nil
		if err := w.drainBefore(found); err != nil {
			w.log.Warn("a worker that is replaced does not go on with its connections; it ends, and they are reset", "function", w.function, "process", found.PID(), "err", err)
		}
		if err := w.release(); err != nil {
			return err
		}
	}
	w.Refused = w.refused
	w.Answer(w.ends)
	return nil
}

// drainBefore has the worker before take no more connections. It is ended if it does not do what it is told, or only says so.
func (w *kernelWorker) drainBefore(found *stream.Found) (err error) {
	record, err := w.records.willDrain(w.function, w.link, found.PID())
	if err != nil {
		err = errors.Join(err, found.End())
		w.records.ended(found.PID())
		return err
	}
	before := found.TakeToDrain(w.function, w.ends)
	defer func() {
		if err != nil {
			err = errors.Join(err, before.Kill())
			w.records.ended(record.PID)
		}
	}()
	if err := before.Drain(); err != nil {
		return err
	}
	// It has closed the link of its program, or it pretends.
	others, err := w.listeners.TakeAll(w.ns)
	if err != nil {
		return err
	}
	if others > 0 {
		return errors.New("it says that it takes no more connections, and has kept the program that gives them to it; somebody may have taken it over")
	}
	w.log.Info("a worker takes no more connections, and ends with those that it has", "function", w.function, "process", record.PID)
	w.records.follow(&drain{workerRecord: record, process: before, counts: w.sameWords})
	return nil
}

// stop ends the process, and takes its program off.
func (w *kernelWorker) stop() (err error) {
	if w.Process != nil {
		err = w.Process.Close()
		w.records.ended(w.PID())
	}
	if w.listeners != nil {
		err = errors.Join(err, w.listeners.Close())
		w.listeners = nil
	}
	return errors.Join(err, removeSocket(w.socket+socketNext))
}

type kernelWorker struct {
	*stream.Process
	node      *host.Net
	ns        *host.NetNS
	function  string
	link      string
	alias     string
	socket    string // where the worker listens for the next agent; "": it ends with this one
	records   *workerRecords
	log       *slog.Logger
	ends      func(stream.Ask) (*stream.Ends, error)
	refused   func(stream.Refusal)
	tag       []byte // for the next agent
	made      bool
	adopted   bool
	instead   *stream.Found        // whose place it takes with Serve
	sameWords bool                 // that one has the same statistics
	inside    int                  // index of the interface in the place
	behind    *host.NetNS          // where plain connections come out of a function; nil: there is none
	taken     []takenOver          // of the function's interfaces
	listeners *dataplane.Listeners // a gateway's; those of a worker that stays are its own once it serves
}

func (w *kernelWorker) Adopted() bool { return w.adopted }

// Sockets asks the kernel: a worker's word about its connections is not needed.
func (w *kernelWorker) Sockets(ends []host.TCPEnds) ([]host.TCPSocket, error) {
	return w.ns.TCPSockets(ends)
}

// place makes the pair of interfaces, and the namespace's routes.
func (w *kernelWorker) place(link string, mtu int) (err error) {
	switch l, err := w.node.Link(link); {
	case errors.Is(err, host.ErrNoLink):
	case err != nil:
		return err
	case l.Alias != w.alias:
		return fmt.Errorf("interface %s exists and is not waystamp's; remove or rename it, or give the function another name", link)
	default: // of an agent before
		if err := w.node.DeleteLink(link); err != nil {
			return err
		}
	}
	node, inside := streamMACs(link)
	if err := w.node.AddVeth(host.Veth{Name: link, PeerName: streamLink, Peer: w.ns, MTU: mtu, MAC: node, PeerMAC: inside}); err != nil {
		return err
	}
	w.made = true
	if err := w.node.SetAlias(link, w.alias); err != nil {
		return err
	}
	place, err := host.Open(w.ns)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, place.Close()) }()
	l, err := place.Link(streamLink)
	if err != nil {
		return err
	}
	w.inside = l.Index
	// Only the programs process the worker's packets. No other protocol is used there.
	for _, s := range []struct {
		n          *host.Net
		key, value string
	}{
		{w.node, "net/ipv6/conf/" + link + "/disable_ipv6", "0"},
		{w.node, "net/ipv6/conf/" + link + "/addr_gen_mode", "1"},
		{w.node, "net/ipv6/conf/" + link + "/accept_ra", "0"},
		{w.node, "net/ipv4/conf/" + link + "/forwarding", "1"}, // otherwise the kernel answers no route look-ups for it
		{w.node, "net/ipv6/conf/" + link + "/forwarding", "1"},
		{place, "net/ipv6/conf/" + streamLink + "/disable_ipv6", "0"},
		{place, "net/ipv6/conf/" + streamLink + "/addr_gen_mode", "1"},
		{place, "net/ipv6/conf/" + streamLink + "/accept_ra", "0"},
	} {
		if err := s.n.SetSysctl(s.key, s.value); err != nil {
			return err
		}
	}
	if err := place.SetSuperPacketMax(streamLink, streamFrames); err != nil {
		return err
	}
	if err := w.node.SetUp(link); err != nil {
		return err
	}
	return stream.Place{Link: streamLink, Gateway: streamGateway, GatewayMAC: node}.Prepare(place)
}

// streamMACs are the addresses of a pair of interfaces, the same each time that it is made.
func streamMACs(link string) (node, inside [6]byte) {
	of := func(side string) (m [6]byte) {
		sum := sha256.Sum256([]byte(link + "\x00" + side))
		copy(m[:], sum[:])
		m[0] = m[0]&^1 | 2 // locally administered, of one station
		return m
	}
	return of("node"), of("inside")
}

// packets makes a socket in the place, at its interface.
func (w *kernelWorker) packets(what string, of func(link int) (*os.File, error)) (f *os.File, err error) {
	err = w.ns.Do(func() error {
		f, err = of(w.inside)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the socket %s: %w", what, err)
	}
	return f, nil
}

func (w *kernelWorker) Whole() error {
	for _, t := range w.taken {
		if err := t.check(w.node); err != nil {
			return err
		}
	}
	return nil
}

func (w *kernelWorker) Close() error {
	if w.instead != nil { // the place is still the other one's
		err := errors.Join(w.stop(), w.instead.Leave(), w.letGo())
		w.instead = nil
		return err
	}
	var errs []error
	if w.socket != "" {
		errs = append(errs, w.stop())
	} else if w.listeners != nil {
		errs = append(errs, w.listeners.Close())
	}
	// A namespace ends some time after its last process; the function's interfaces are free at once.
	for _, t := range w.taken {
		errs = append(errs, t.release())
	}
	if w.behind != nil {
		errs = append(errs, w.behind.Close())
	}
	if w.made {
		if err := w.node.DeleteLink(w.link); err != nil && !errors.Is(err, host.ErrNoLink) {
			errs = append(errs, err)
		}
	}
	if w.socket != "" {
		errs = append(errs, removeSocket(w.socket))
		// Those that drain end with the interface, unless they pretend.
		errs = append(errs, w.records.endAll(func(l string) bool { return l == w.link }, w.node.NetNS()))
	}
	return errors.Join(append(errs, w.ns.Close())...)
}

// Leave lets go of the worker and its place, which go on.
func (w *kernelWorker) Leave() error {
	if w.instead != nil {
		return w.Close()
	}
	return errors.Join(w.Process.Leave(), w.letGo())
}

// letGo gives up the handles of the place.
func (w *kernelWorker) letGo() (err error) {
	for _, ns := range []*host.NetNS{w.ns, w.behind} {
		if ns != nil {
			err = errors.Join(err, ns.Close())
		}
	}
	return err
}

// streamFunction is a function of kind stream and its worker.
type streamFunction struct {
	config   string       // of the worker, and its MTU
	worker   streamWorker // nil: there is none
	err      error        // why
	restarts int
	failed   int       // times in a row
	since    time.Time // when the worker started
	after    time.Time // it is not started again before
	told     string    // a gateway's configuration; "": it has none
	serves   bool      // the plan in force has this worker
	said     string    // why its keys could not be read, as last logged
}

// A worker that ends is started again after a while, which doubles each time.
const (
	streamPauseMin = time.Second / 4
	streamPauseMax = 30 * time.Second
	streamWell     = time.Minute // after which it counts as the first time
)

// streams are the functions of kind stream that are there. The loop alone changes them.
type streams struct {
	mu     sync.Mutex // readers look, too
	by     map[string]*streamFunction
	kept   map[string]dataplane.Connections // as last counted
	wakeUp chan struct{}                    // a worker has ended
	swept  bool                             // nothing is left of an agent before
}

// ensureStreams starts the missing workers of a plan, and ends workers of functions that are
// gone. A function without a worker gets no packets.
func (a *agent) ensureStreams(n plan.Node, withheld map[string]error) {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	wanted := map[string]bool{}
	var links []string
	for _, p := range n.Proxies {
		ensure := a.ensureStreamLocked
		switch {
		case p.Gateway != nil:
			ensure = a.ensureGatewayLocked
		case p.Stream == nil:
			continue
		}
		wanted[p.Function] = true
		links = append(links, p.To)
		if err := ensure(n, p); err != nil {
			withheld[p.Function] = err
		}
	}
	for name, f := range a.streams.by {
		if !wanted[name] {
			a.endStream(name, f)
			delete(a.streams.by, name)
			a.streams.swept = false // also of one that could not be started, and has others that drain
		}
	}
	// An agent that was killed could not remove them; there are no others that it did not make.
	if !a.streams.swept {
		if err := a.places.RemoveStrays(links); err != nil {
			a.cfg.Log.Error("resources of a previous agent for functions of kind stream could not be removed", "err", err)
			return
		}
		a.streams.swept = true
	}
}

func (a *agent) endStream(name string, f *streamFunction) {
	if f.worker == nil {
		return
	}
	if err := f.worker.Close(); err != nil {
		a.cfg.Log.Error("a worker, or its place, could not be removed", "function", name, "err", err)
	}
	f.worker = nil
}

func (a *agent) ensureStreamLocked(_ plan.Node, p plan.Proxy) error {
	s := p.Stream
	var hold *stream.Hold
	if !s.Early {
		node, inside := streamMACs(p.To)
		hold = &stream.Hold{Node: node, Worker: inside}
	}
	text, err := stream.Text(p.Function, streamPort, 0, s.Run, s.Back, hold, s.Intrusive, stream.Limits{
		Connections: s.Connections, Buffer: s.Buffer, Idle: s.Idle, HalfClosed: s.HalfClosed,
	})
	if err != nil {
		return err
	}
	keys, err := readKeys(s.Run, s.Back)
	switch {
	case err != nil && a.streams.runsLocked(p.Function):
		// Its connections go on, and new ones have the keys that it has.
		if f := a.streams.by[p.Function]; f.said != err.Error() {
			f.said = err.Error()
			a.cfg.Log.Error("keys of a function cannot be read; its worker goes on as it is, and is not replaced until they can", "function", p.Function, "err", err)
		}
		return nil
	case err != nil:
		if f := a.streams.by[p.Function]; f == nil { // for who asks why
			a.streams.by[p.Function] = &streamFunction{err: err}
		} else {
			a.endStream(p.Function, f) // what is left of one that has ended
			f.err = err
		}
		return err
	case len(keys) > 0:
		if text, err = stream.WithKeys(text, keys); err != nil {
			return err
		}
	}
	config := fmt.Sprintf("%s %d %v", digest(text), s.MTU, s.Attached)
	return a.ensureWorkerLocked(p.Function, config, func() (streamWorker, error) { return a.places.Start(p, text, a.endsOf(p), a.refusedBy(p)) })
}

// readKeys reads the keys of seal and open that a function needs.
func readKeys(run, back []string) (function.Keys, error) {
	files, err := function.KeyFiles(run, back)
	if err != nil || len(files) == 0 {
		return nil, err
	}
	keys := function.Keys{}
	for _, number := range slices.Sorted(maps.Keys(files)) {
		b, err := planfile.Read(files[number])
		if err != nil {
			return nil, fmt.Errorf("read key %d of seal and open: %w", number, err)
		}
		var k function.Key
		if err := k.UnmarshalText(bytes.TrimSpace(b)); err != nil {
			return nil, fmt.Errorf("read key %d of seal and open: %s: %w", number, files[number], err)
		}
		keys[number] = k
	}
	return keys, nil
}

// runsLocked reports whether a function has a worker that runs.
func (s *streams) runsLocked(name string) bool {
	f := s.by[name]
	if f == nil || f.worker == nil {
		return false
	}
	select {
	case <-f.worker.Ended():
		return false
	default:
		return true
	}
}

// ensureWorkerLocked starts a function's worker, unless one of that configuration runs, or has just failed.
func (a *agent) ensureWorkerLocked(function, config string, start func() (streamWorker, error)) error {
	f := a.streams.by[function]
	if f == nil || f.config != config {
		next := &streamFunction{config: config}
		if f != nil {
			next.restarts = f.restarts
			a.letGo(function, f)
		}
		f = next
		a.streams.by[function] = f
	}
	if f.worker != nil {
		var why error
		what := "a worker ended; its connections are reset"
		select {
		case <-f.worker.Ended():
			why = f.worker.Err()
			f.err = fmt.Errorf("its worker ended: %w", why)
		default:
			if why = f.worker.Whole(); why == nil {
				return nil
			}
			what = "a function lost an interface; its worker is ended, and its connections are reset"
			f.err = why
		}
		if time.Since(f.since) > streamWell {
			f.failed = 0
		}
		f.failed++
		f.restarts++
		pause := min(streamPauseMax, streamPauseMin<<min(f.failed-1, 10))
		f.after = time.Now().Add(pause)
		a.cfg.Log.Error(what, "function", function, "err", why, "again in", pause)
		a.endStream(function, f)
	}
	if wait := time.Until(f.after); wait > 0 {
		time.AfterFunc(wait, func() { notify(a.streams.wakeUp) })
		return f.err
	}
	worker, err := start()
	if err != nil {
		return a.failedToStart(f, err)
	}
	f.worker, f.err, f.since, f.serves = worker, nil, time.Now(), false
	go func() {
		<-worker.Ended()
		notify(a.streams.wakeUp)
	}()
	what := "a worker runs"
	if worker.Adopted() {
		what = "a worker is taken over that ran already; its connections go on"
	}
	a.cfg.Log.Info(what, "function", function, "process", worker.PID())
	if room := worker.Statistics().Room; room > 0 {
		a.cfg.Log.Warn("a worker has descriptors for fewer connections than its limit allows, and refuses more; raise the agent's limit of open files", "function", function, "connections", room)
	}
	return nil
}

// letGo leaves a function's worker to Start, which finds it: it is taken over, or replaced, or ended. A gateway's ends.
func (a *agent) letGo(function string, f *streamFunction) {
	if f.worker == nil {
		return
	}
	select {
	case <-f.worker.Ended():
		a.endStream(function, f)
		return
	default:
	}
	if err := f.worker.Leave(); err != nil {
		a.cfg.Log.Error("a worker could not be left to the next configuration", "function", function, "err", err)
	}
	f.worker = nil
}

// serveStreams has the workers serve that were started for the plan that is in force now.
func (a *agent) serveStreams() {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	for name, f := range a.streams.by {
		if f.worker == nil || f.serves {
			continue
		}
		f.serves = true
		if err := f.worker.Serve(); err != nil {
			a.cfg.Log.Error("a worker does not serve; it is ended", "function", name, "err", err)
			a.endStream(name, f)
			a.failedToStart(f, err)
		}
	}
}

// failedToStart tries again after a while.
func (a *agent) failedToStart(f *streamFunction, err error) error {
	f.err, f.failed = err, f.failed+1
	f.after = time.Now().Add(min(streamPauseMax, streamPauseMin<<min(f.failed-1, 10)))
	time.AfterFunc(time.Until(f.after), func() { notify(a.streams.wakeUp) })
	return err
}

// leaveStreams leaves all workers to the next agent, unless this one has started them for a plan that did not come
// into force: such a worker ends.
func (a *agent) leaveStreams() {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	for name, f := range a.streams.by {
		if f.worker == nil || a.plan == nil && !f.worker.Adopted() {
			a.endStream(name, f)
			continue
		}
		if err := f.worker.Leave(); err != nil {
			a.cfg.Log.Error("a worker could not be left to the next agent", "function", name, "err", err)
		}
		f.worker = nil
	}
	if err := a.places.Leave(); err != nil {
		a.cfg.Log.Error("workers that take no more connections could not be left to the next agent", "err", err)
	}
}

// followStreams reconciles if a worker has ended, or may be started again.
func (a *agent) followStreams() {
	if a.plan != nil && slices.ContainsFunc(a.plan.Proxies, func(p plan.Proxy) bool { return p.Stream != nil || p.Gateway != nil }) {
		a.reconcile()
	}
}

// sweepConnections removes ended connections of functions of kind stream. The worker ends
// connections that are idle for too long; they are kept only a little longer.
func (a *agent) sweepConnections() {
	idle := map[string]time.Duration{}
	for _, p := range a.plan.Proxies {
		if p.Stream != nil {
			idle[p.Function] = max(p.Stream.Idle, p.Stream.HalfClosed) + streamWell
		}
		if p.Gateway != nil {
			idle[p.Function] = gatewayIdle
		}
	}
	if len(idle) == 0 {
		return
	}
	kept, err := a.dp.SweepConnections(idle)
	if err != nil {
		a.fail("closed connections could not be removed from the table", err)
		return
	}
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	a.streams.kept = kept
}

// streamsOf is the state of the functions of kind stream.
func (a *agent) streamsOf() map[string]*api.Stream {
	a.streams.mu.Lock()
	defer a.streams.mu.Unlock()
	out := map[string]*api.Stream{}
	for name, f := range a.streams.by {
		s := &api.Stream{Restarts: f.restarts, Kept: a.streams.kept[name].Open + a.streams.kept[name].New}
		out[name] = s
		s.Draining = a.places.Draining(name)
		if f.worker == nil {
			if f.err != nil {
				s.Error = f.err.Error()
			}
			continue
		}
		n := f.worker.Statistics()
		s.Loops, s.Room = len(n.Rounds), n.Room
		s.Worker, s.Now, s.Opened, s.Refused, s.Ended, s.Unreached = f.worker.PID(), n.Now, n.Opened, n.Refused, n.Ended, n.Unreached
		s.ResetByClient, s.ResetByServer, s.ResetByFunction, s.ResetByLimit = n.ResetByClient, n.ResetByServer, n.ResetByFunction, n.ResetByLimit
		s.PartMismatch, s.Unsealed, s.Peer, s.Untrusted, s.Expired, s.Revoked, s.NoKey = n.PartMismatch, n.Unsealed, n.Peer, n.Untrusted, n.Expired, n.Revoked, n.NoKey
		s.Batches, s.Unbatched = n.Batches, n.Unbatched
		s.Run, s.Back = operationsOf(n.Run), operationsOf(n.Back)
		s.ToServer, s.ToClient = api.StreamBytes(n.ToServer), api.StreamBytes(n.ToClient)
	}
	return out
}

func operationsOf(steps []stream.Step) (out []api.StreamOperation) {
	for _, s := range steps {
		out = append(out, api.StreamOperation(s))
	}
	return out
}
