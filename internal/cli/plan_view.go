package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"unicode/utf8"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// planView is a compiled domain without its secrets, as -o json prints it.
type planView struct {
	Version   int                `json:"version"`
	Block     netip.Prefix       `json:"block"`
	MPLS      *planMPLSView      `json:"mpls,omitempty"`
	Paths     []planPathView     `json:"paths"`
	Nodes     []planNodeView     `json:"nodes"`
	Functions []planFunctionView `json:"functions,omitempty"` // those that have a proxy
	Streams   []planStreamView   `json:"streams,omitempty"`
	Services  []planServiceView  `json:"services,omitempty"`
}

// planStreamView is a function of kind stream.
type planStreamView struct {
	Name        string            `json:"name"`
	Node        string            `json:"node"`
	Link        string            `json:"interface"`
	Run         []json.RawMessage `json:"run"`
	Back        []json.RawMessage `json:"back,omitempty"` // none: run in reverse, each one's inverse
	MTU         int               `json:"mtu_bytes"`
	Connections int               `json:"connections"`
	Buffer      int               `json:"buffer_bytes"`        // per connection and direction
	Intrusive   bool              `json:"intrusive,omitempty"` // it reads what its chains seal
	Idle        string            `json:"idle"`
	HalfClosed  string            `json:"half_closed"`

	// In place of run: the node's interfaces by which connections go in plain through the function.
	To   string     `json:"to,omitempty"`
	From string     `json:"from,omitempty"`
	Via  netip.Addr `json:"via,omitzero"`

	Namespace string `json:"namespace,omitempty"` // of a packet filter that is behind these
}

// run is what a function does, in a word or two.
func (f planStreamView) run() string {
	if f.To == "" {
		return listText(f.Run)
	}
	if f.Namespace != "" {
		return "plain through netfilter, namespace " + f.Namespace
	}
	return "plain through " + f.To + ", " + f.From
}

func rawList(list []string) []json.RawMessage {
	var out []json.RawMessage
	for _, s := range list {
		out = append(out, json.RawMessage(s))
	}
	return out
}

// listText is a list as the domain file has it, but on one line.
func listText(list []json.RawMessage) string {
	if list == nil {
		return "(inverse)"
	}
	var out []string
	for _, s := range list {
		out = append(out, strings.ReplaceAll(string(s), `"`, ""))
	}
	return strings.Join(out, ", ")
}

type planPathView struct {
	Chain       string            `json:"chain"`
	Direction   model.Direction   `json:"direction"`
	From        string            `json:"from,omitempty"` // the function that the path starts at
	To          string            `json:"to,omitempty"`   // the function of kind stream that it ends at
	Path        string            `json:"path"`
	Epoch       *uint8            `json:"epoch,omitempty"` // of plans that were written
	Scheme      model.Scheme      `json:"scheme"`
	OnViolation model.OnViolation `json:"on_violation"`
	Guard       model.Guard       `json:"guard,omitzero"`
	Destination netip.Prefix      `json:"destination,omitzero"`
	Source      netip.Prefix      `json:"source,omitzero"`
	Priority    uint16            `json:"priority,omitzero"`
	Protocol    model.Protocol    `json:"protocol,omitzero"`
	SourcePort  model.Ports       `json:"source_port,omitzero"`
	Port        model.Ports       `json:"destination_port,omitzero"`
	DSCP        model.DSCP        `json:"dscp,omitzero"`
	Mark        model.Mark        `json:"mark,omitzero"`
	OwnTraffic  bool              `json:"own_traffic,omitempty"`
	Ingress     []planIngressView `json:"ingress"`
	Segments    []planSegmentView `json:"segments"`
	Sent        planSentView      `json:"encapsulation"`
	Overhead    int               `json:"overhead_bytes"`
	MTU         int               `json:"mtu_bytes,omitempty"`
	MSS         int               `json:"tcp_mss_bytes,omitempty"`
	Clamp       int               `json:"tcp_mss_clamp_bytes,omitempty"`
	Lanes       int               `json:"lanes"`
	Window      int               `json:"window"`              // numbers of each lane
	Replay      int               `json:"replay_window_bytes"` // per live epoch

	match  model.Match
	oneWay bool
	made   bool // of what the function makes that it starts at
}

type planIngressView struct {
	Node  string `json:"node"`
	Lane  uint16 `json:"lane"`
	Lanes uint16 `json:"lanes"`
}

// planSegmentView is one SID that the path visits. A waypoint has neither a position
// in the proof nor a node.
type planSegmentView struct {
	Position int        `json:"position,omitempty"`
	Node     string     `json:"node,omitempty"`
	Function string     `json:"function,omitempty"` // none: the egress, or a waypoint
	Waypoint bool       `json:"waypoint,omitempty"`
	SID      netip.Addr `json:"sid"`
	Argument uint32     `json:"argument,omitempty"` // for the function

	Parameters string `json:"parameters,omitempty"` // of the visit to the function that the path ends at

	NodeLabel    uint32 `json:"node_label,omitempty"` // of a path over labels
	ServiceLabel uint32 `json:"service_label,omitempty"`

	hidden bool       // the argument, or the parameters, are in the plans alone
	sent   netip.Addr // the SID with its parameters; not valid: it has none
}

// planMPLSView is what the domain says of labels.
type planMPLSView struct {
	First uint32 `json:"service_labels_first"`
	Last  uint32 `json:"service_labels_last"`
	MTU   int    `json:"mtu_bytes,omitempty"` // behind the Ethernet header, on each link of the core
}

// planSentView is how the segments are written into packets: those that leave
// the headend have this destination and this list, or these labels.
type planSentView struct {
	Type        model.EncapsulationType `json:"type,omitzero"` // none: srv6
	SIDs        model.SIDs              `json:"sids"`
	Reduced     bool                    `json:"reduced"`
	Destination netip.Addr              `json:"destination,omitzero"`
	List        []netip.Addr            `json:"segment_list,omitempty"` // in the order of the visit
	Labels      []uint32                `json:"labels,omitempty"`       // without entropy indicator and label, which are behind the first
}

func newPlanSentView(p plan.Path) planSentView {
	v := planSentView{Type: p.Encapsulation.Type, SIDs: p.Encapsulation.SIDs, Reduced: p.Encapsulation.Reduced}
	if !p.OverLabels() {
		v.Destination, v.List = p.Segments()[0], p.Carried()
		return v
	}
	for _, h := range p.Hops[1:] {
		v.Labels = append(v.Labels, h.NodeLabel, h.ServiceLabel)
	}
	return v
}

func (v planSentView) table(b *strings.Builder) {
	if v.Type == model.EncapsulationSRMPLS {
		b.WriteString("  sent as a stack of labels:")
		for i, l := range v.Labels {
			if i == 1 {
				b.WriteString(", entropy indicator and label")
			}
			if i > 0 {
				b.WriteByte(',')
			}
			fmt.Fprintf(b, " %d", l)
		}
		b.WriteByte('\n')
		return
	}
	e := model.Encapsulation{SIDs: v.SIDs, Reduced: v.Reduced}
	if e == (model.Encapsulation{}) {
		return // what the table of positions says
	}
	list := make([]string, len(v.List))
	for i, a := range v.List {
		list[i] = a.String()
	}
	fmt.Fprintf(b, "  %s: sent to %s, segment list %s\n", e, v.Destination, strings.Join(list, ", "))
}

type planNodeView struct {
	Name      string       `json:"name"`
	Address   netip.Addr   `json:"address"`
	Locator   netip.Prefix `json:"locator"`
	Label     uint32       `json:"label,omitempty"`
	To        netip.Addr   `json:"label_address,omitzero"` // that packets with the label are routed to
	SIDs      int          `json:"sids"`
	Room      int          `json:"sids_max"`
	Headends  int          `json:"headends"`
	Endpoints int          `json:"endpoints"`
	Egresses  int          `json:"egresses"`
	Replay    int          `json:"replay_window_bytes"` // per live epoch of each path, in whole slabs
}

type planFunctionView struct {
	Name      string          `json:"name"`
	Node      string          `json:"node"`
	Kind      model.Kind      `json:"kind"`
	Local     bool            `json:"local,omitempty"`
	To        string          `json:"to,omitempty"`
	From      string          `json:"from,omitempty"`
	Via       netip.Addr      `json:"via,omitzero"`
	Recognise model.Recognise `json:"recognise"`
	Segments  model.Segments  `json:"segments"`
	OnUnknown model.OnUnknown `json:"on_unknown"`
	Rewrites  bool            `json:"rewrites,omitempty"`
	Cache     int             `json:"cache_headers"`
	Memory    int             `json:"cache_bytes"`
	Lifetime  string          `json:"lifetime"`

	// Of kind netfilter.
	Namespace string            `json:"namespace,omitempty"`
	Arguments map[string]uint32 `json:"arguments,omitempty"`
	Zones     [][]uint32        `json:"zones,omitempty"` // arguments that are tracked together

	attachment string
}

func newPlanView(d *plan.Domain, epochs bool) planView {
	v := planView{Version: 1, Block: d.Block, Paths: []planPathView{}, Nodes: []planNodeView{}}
	replay := map[string]int{}
	type way struct {
		chain string
		is    model.Direction
	}
	ways := map[way]bool{}
	for i := range d.Paths {
		ways[way{d.Paths[i].Chain, d.Paths[i].Direction}] = true
	}
	stream, ends := map[string]bool{}, map[string]bool{}
	for _, n := range d.Nodes {
		for _, p := range n.Proxies {
			stream[p.Function] = n.IsStream(p.Function)
			ends[p.Function] = p.Stream != nil && p.Stream.Intrusive
		}
	}
	back := map[model.Direction]model.Direction{model.Forward: model.Reverse, model.Reverse: model.Forward}
	for _, p := range d.Paths {
		pv := planPathView{
			Chain:       p.Chain,
			Direction:   p.Direction,
			From:        p.From,
			To:          p.To,
			Path:        fmt.Sprintf("0x%08x", p.Path),
			Scheme:      p.Scheme,
			OnViolation: p.OnViolation,
			Guard:       p.Guard,
			Destination: p.Match.Destination,
			Source:      p.Match.Source,
			Priority:    p.Match.Priority,
			Protocol:    p.Match.Protocol,
			SourcePort:  p.Match.SourcePort,
			Port:        p.Match.DestinationPort,
			DSCP:        p.Match.DSCP,
			Mark:        p.Match.Mark,
			OwnTraffic:  p.OwnTraffic,
			Sent:        newPlanSentView(p),
			Overhead:    p.OuterLen(),
			MTU:         p.MTU,
			Clamp:       p.MSS,
			match:       p.Match,
			made:        p.From != "" && !stream[p.From],
			oneWay:      !ways[way{p.Chain, back[p.Direction]}],
		}
		if epochs {
			pv.Epoch = &p.Epoch
		}
		if p.MTU > 0 {
			pv.MSS = model.MSS(p.MTU, p.Match.Is4())
		}
		for _, in := range p.Ingress {
			pv.Ingress = append(pv.Ingress, planIngressView{in.Node, in.Lane, in.Lanes})
			pv.Lanes += int(in.Lanes)
		}
		pv.Window = p.Window
		pv.Replay = model.WindowMemory(pv.Lanes, p.Window)
		for j, h := range p.Hops[1:] {
			for _, sid := range h.Waypoints {
				pv.Segments = append(pv.Segments, planSegmentView{Waypoint: true, SID: sid})
			}
			s := planSegmentView{
				Position: j + 1, Node: h.Node, Function: h.Function, SID: h.SID, Argument: h.Argument,
				NodeLabel: h.NodeLabel, ServiceLabel: h.ServiceLabel,
				hidden: p.Encapsulation.SIDs == model.SIDsCompressed || h.Parameters != 0 && p.OverLabels(),
			}
			if h.Parameters != 0 {
				s.Parameters = model.ParametersText(h.Parameters)
				if !s.hidden {
					list := p.Segments()
					s.sent = list[len(list)-1]
				}
			}
			pv.Segments = append(pv.Segments, s)
		}
		replay[p.Hops[len(p.Hops)-1].Node] += pv.Replay
		v.Paths = append(v.Paths, pv)
	}
	for _, n := range d.Nodes {
		var own plan.MPLSNode
		if m := n.MPLS; m != nil {
			own, _ = m.NodeOf(m.Label)
			v.MPLS = &planMPLSView{First: m.Services, Last: m.Services + model.ServiceLabels - 1, MTU: m.MTU}
		}
		v.Nodes = append(v.Nodes, planNodeView{
			Label:     own.Label,
			To:        own.Address,
			Name:      n.Name,
			Address:   n.Address,
			Locator:   n.Locator,
			SIDs:      len(sidsOf(n)),
			Room:      model.Room(n.Locator),
			Headends:  len(n.Headends),
			Endpoints: len(n.Endpoints),
			Egresses:  len(n.Egresses),
			Replay:    model.WindowSlabs(replay[n.Name]),
		})
		for _, p := range n.Proxies {
			if p.Gateway != nil {
				v.Services = append(v.Services, newPlanServiceViews(n.Name, p.Gateway, ends, d.Paths)...)
				continue
			}
			f := planFunctionView{
				Name:       p.Function,
				Node:       n.Name,
				Kind:       model.KindUnaware,
				Local:      p.Local,
				To:         p.To,
				From:       p.From,
				Via:        p.Via,
				Recognise:  p.Recognise,
				Segments:   p.Segments,
				OnUnknown:  p.OnUnknown,
				Rewrites:   p.Rewrites,
				Cache:      p.Cache,
				Memory:     p.CacheMemory(),
				Lifetime:   p.Lifetime.String(),
				attachment: p.Attachment(),
			}
			if x := p.Stream; x != nil {
				namespace := ""
				if p.Netfilter != nil {
					namespace = p.Netfilter.Namespace
				}
				v.Streams = append(v.Streams, planStreamView{
					Name: p.Function, Node: n.Name, Link: p.To, Run: rawList(x.Run), Back: rawList(x.Back), MTU: x.MTU,
					Connections: x.Connections, Buffer: x.Buffer, Idle: x.Idle.String(), HalfClosed: x.HalfClosed.String(), Intrusive: x.Intrusive,
					To: x.Attached.To, From: x.Attached.From, Via: x.Attached.Via, Namespace: namespace,
				})
				continue
			}
			if x := p.Netfilter; x != nil {
				f.Kind, f.Namespace, f.Arguments, f.Zones = model.KindNetfilter, x.Namespace, x.Arguments, x.Groups
				f.attachment = "netfilter, namespace " + x.Namespace
			}
			v.Functions = append(v.Functions, f)
		}
	}
	return v
}

// sidsOf are the SIDs of a node that paths visit, each once.
func sidsOf(n plan.Node) map[netip.Addr]bool {
	sids := map[netip.Addr]bool{}
	for _, e := range n.Endpoints {
		sids[e.SID] = true
	}
	for _, e := range n.Egresses {
		sids[e.SID] = true
	}
	return sids
}

func (v planView) json(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func (v planView) table(w io.Writer) error {
	var b strings.Builder
	for _, p := range v.Paths {
		p.table(&b)
		b.WriteByte('\n')
	}
	t := planTable{head: []string{"NODE", "ADDRESS", "LOCATOR", ">SIDS", ">OF", ">HEADENDS", ">ENDPOINTS", ">EGRESSES", ">REPLAY BYTES"}}
	for _, n := range v.Nodes {
		t.add(n.Name, n.Address, n.Locator, n.SIDs, n.Room, n.Headends, n.Endpoints, n.Egresses, n.Replay)
	}
	t.write(&b, "")
	if v.MPLS != nil {
		v.labels(&b)
	}
	if len(v.Functions) > 0 {
		t := planTable{head: []string{"FUNCTION", "NODE", "ATTACHED", "RECOGNISED BY", "SEGMENTS", "ON UNKNOWN", ">LIFETIME", ">CACHE", ">CACHE BYTES"}}
		for _, f := range v.Functions {
			t.add(f.Name, f.Node, f.attachment, f.Recognise, f.Segments, f.OnUnknown, f.Lifetime, f.Cache, f.Memory)
		}
		b.WriteByte('\n')
		t.write(&b, "")
	}
	if len(v.Streams) > 0 {
		t := planTable{head: []string{"STREAM FUNCTION", "NODE", "INTERFACE", "RUN", "BACK", ">MTU", ">CONNECTIONS", ">BUFFER", ">IDLE", ">HALF-CLOSED"}}
		for _, f := range v.Streams {
			t.add(f.Name, f.Node, f.Link, f.run(), listText(f.Back), f.MTU, f.Connections, f.Buffer, f.Idle, f.HalfClosed)
		}
		b.WriteByte('\n')
		t.write(&b, "")
	}
	services(&b, v.Services)
	_, err := io.WriteString(w, b.String())
	return err
}

func (v planView) labels(b *strings.Builder) {
	t := planTable{head: []string{"NODE", ">LABEL", "ADDRESS FOR LABELS"}}
	for _, n := range v.Nodes {
		if n.Label != 0 {
			t.add(n.Name, n.Label, n.To)
		}
	}
	b.WriteByte('\n')
	t.write(b, "")
	fmt.Fprintf(b, "service labels are %d to %d", v.MPLS.First, v.MPLS.Last)
	if v.MPLS.MTU > 0 {
		fmt.Fprintf(b, "; links of the core carry %d bytes, labels included", v.MPLS.MTU)
	}
	b.WriteByte('\n')
}

func (p planPathView) table(b *strings.Builder) {
	fmt.Fprintf(b, "chain %s, %s%s: path %s", p.Chain, p.Direction, plan.FromTo(p.From, p.To), p.Path)
	if p.Epoch != nil {
		fmt.Fprintf(b, ", epoch %d", *p.Epoch)
	}
	if p.made {
		p.short(b)
		return
	}
	fmt.Fprintf(b, ", proof %s, on violation %s", p.Scheme, p.OnViolation)
	if p.Guard != model.GuardUnset {
		fmt.Fprintf(b, ", guard %s", p.Guard)
	}
	b.WriteByte('\n')
	if p.From != "" {
		fmt.Fprintf(b, "  takes what %s sends of its connections, of %s", p.From, p.match)
	} else {
		fmt.Fprintf(b, "  takes %s", p.match)
	}
	if p.OwnTraffic {
		b.WriteString(", also of its headends' own packets")
	}
	b.WriteByte('\n')
	t := planTable{head: []string{">POSITION", "NODE", "FUNCTION", "SID"}}
	labels := p.Sent.Type == model.EncapsulationSRMPLS
	if labels {
		t.head = append(t.head, ">NODE LABEL", ">SERVICE LABEL")
	}
	for _, in := range p.Ingress {
		t.add(0, in.Node, fmt.Sprintf("(headend, lanes %d-%d)", in.Lane, in.Lane+in.Lanes-1))
	}
	for _, s := range p.Segments {
		if s.Waypoint {
			t.add("", "", "(waypoint, not proven)", s.SID)
			continue
		}
		function := s.Function
		if function == "" {
			function = "(egress)"
			if p.To != "" {
				function = "(ends at " + p.To + ")"
			}
		}
		switch {
		case s.Argument > 0 && s.hidden:
			function += fmt.Sprintf(", argument %d, not on the wire", s.Argument)
		case s.Argument > 0:
			function += fmt.Sprintf(", argument %d", s.Argument)
		case s.Parameters != "" && s.hidden:
			function += ", parameters not on the wire" // the name has them
		}
		sid := s.SID
		if s.sent.IsValid() {
			sid = s.sent
		}
		cells := []any{s.Position, s.Node, function, sid}
		if labels {
			cells = append(cells, s.NodeLabel, s.ServiceLabel)
		}
		t.add(cells...)
	}
	t.write(b, "  ")
	p.Sent.table(b)
	fmt.Fprintf(b, "  headers take %d bytes; ", p.Overhead)
	if p.MTU > 0 {
		fmt.Fprintf(b, "MTU of packets %d, MSS of TCP %d bytes\n", p.MTU, p.MSS)
	} else {
		b.WriteString("the MTU is not known: no core interface on the path declares one\n")
	}
	if p.Clamp > 0 {
		fmt.Fprintf(b, "  lowers the MSS in TCP SYNs to %d bytes, for segments of the reverse direction\n", p.Clamp)
		if p.oneWay {
			b.WriteString("  and has no reverse path: set mss-clamp also on the chain for the answers, to limit segments in this direction\n")
		}
	}
	fmt.Fprintf(b, "  its replay window at %s takes %d bytes per live epoch (%d lanes, the last %d numbers of each)\n",
		p.Segments[len(p.Segments)-1].Node, p.Replay, p.Lanes, p.Window)
}

// short says of a path from a function on what is not that of the whole one.
func (p planPathView) short(b *strings.Builder) {
	var way []string
	for _, s := range p.Segments {
		switch {
		case s.Waypoint:
			way = append(way, s.SID.String()+" (waypoint, not proven)")
		case s.Function == "":
			way = append(way, s.Node+" (egress)")
		default:
			way = append(way, s.Function+" on "+s.Node)
		}
	}
	fmt.Fprintf(b, "\n  takes what %s on %s makes itself, by %s\n", p.From, p.Ingress[0].Node, strings.Join(way, ", "))
	fmt.Fprintf(b, "  its replay window at %s takes %d bytes per live epoch (%d lanes, the last %d numbers of each)\n",
		p.Segments[len(p.Segments)-1].Node, p.Replay, p.Lanes, p.Window)
}

// planTable is rows of cells. A column whose head starts with > is aligned
// right.
type planTable struct {
	head []string
	rows [][]string
}

func (t *planTable) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = fmt.Sprint(c)
	}
	t.rows = append(t.rows, row)
}

func (t *planTable) write(b *strings.Builder, indent string) {
	right := make([]bool, len(t.head))
	head := make([]string, len(t.head))
	width := make([]int, len(t.head))
	for i, h := range t.head {
		head[i], right[i] = strings.CutPrefix(h, ">")
	}
	rows := append([][]string{head}, t.rows...)
	for _, row := range rows {
		for i, c := range row {
			width[i] = max(width[i], utf8.RuneCountInString(c))
		}
	}
	for _, row := range rows {
		line := indent
		for i, c := range row {
			if i > 0 {
				line += "  "
			}
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c))
			if right[i] {
				line += pad + c
			} else {
				line += c + pad
			}
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}
