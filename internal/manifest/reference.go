package manifest

import (
	"strconv"

	"github.com/waystamp/waystamp/internal/model"
)

// Description is what docs/reference/domain-file.md says of a field beside what the
// reader itself knows. A test fails for a field without one.
type Description struct {
	Default string // as it could be written in the file; or words, with a space in front
	Text    string // Markdown, one or two sentences
}

// Section is a mapping of the file, with the rules between its fields. A test fails
// for a mapping without one.
type Section struct {
	Path  string // as in Field
	Title string
	Text  string
	Rules []string
}

// Sections lists the mappings of the file in the order of the page.
func Sections() []Section {
	return []Section{
		{
			Path: "", Title: "The file",
			Text: "One YAML file describes one domain. Anchors, aliases and tags are refused: write values out.",
			Rules: []string{
				"An unknown, repeated or empty field is an error. Every error of a file is reported at once, with its line.",
				"Names of nodes, of functions and of chains are 1 to " + strconv.Itoa(model.NameMax) + " characters of `a-z`, `0-9` and `-`, and do not start with `-`. Each is unique among its kind.",
				"A file has at most 16 MiB, 64 levels of lists and mappings, and 256 bytes in a value.",
				"Only `waystamp lab` needs the section `lab`; it changes no plan.",
			},
		},
		{
			Path: "domain", Title: "domain",
			Text: "What all nodes share.",
		},
		{
			Path: "domain.mpls", Title: "domain: mpls",
			Text: "Labels for chains of type `sr-mpls`. A visit has a *service label*: `services` plus the 16 bits of its SID behind the block. Node labels are of [nodes](#nodes-mpls). No label is allocated by a protocol: routers of the core know node labels by static routes or by an IGP with the same label for a node everywhere (RFC 8402 section 3.1.2).",
			Rules: []string{
				"The 65536 labels from `services` on are service labels. No node has one of them.",
				"A chain of type `sr-mpls` needs an `mtu` here, or one at every core interface of its nodes: no router answers packets with labels that are too long.",
			},
		},
		{
			Path: "nodes[]", Title: "nodes",
			Text: "A node is a Linux machine that runs `waystamp agent`. Routers in between that only forward IPv6 are not listed.",
			Rules: []string{
				"A node that is an ingress or an egress of a chain needs an interface of each role; one that has a function needs a `core` interface.",
				"Locators are within the block and do not overlap. A locator needs room for one SID per visit: a /56 has 256. SID 0 of the block is not used.",
				"An address is outside of the block, and of one node only.",
				"`advertise: sids` needs a locator of /63 or shorter.",
				"The replay windows of one node take at most 1 GiB; see `cpus` and `proof.window`.",
			},
		},
		{
			Path: "nodes[].mpls", Title: "nodes: mpls",
			Text: "How packets with labels reach the node. A node that a chain of type `sr-mpls` visits, or ends at, needs it, and so does the domain ([mpls](#domain-mpls)).",
			Rules: []string{
				"A label and an address are one node's. An address is outside of the block.",
			},
		},
		{
			Path: "nodes[].interfaces[]", Title: "nodes: interfaces",
			Text: "The network devices by which packets of the domain enter and leave the node. waystamp attaches to these and to no others. A device " +
				"that a function is reached by is not listed here.",
			Rules: []string{
				"List every device that leads outside as `edge`, VLAN interfaces too: what enters and leaves by devices that are not listed is routed without a check ([SECURITY](../../SECURITY.md#what-waystamp-does-not-promise)).",
				"A device carries Ethernet frames; tun and WireGuard devices are refused by the agent.",
				"Only an `edge` interface has `unmatched` and `guard`.",
			},
		},
		{
			Path: "functions[]", Title: "functions",
			Text: "A function is a place that packets of a chain have to visit. [The how-to](../how-to/functions.md) says which kind to use when, and [netfilter](../how-to/netfilter.md) has its own page.",
			Rules: []string{
				"`attach` is required for kind `unaware`. `attach`, `recognise` and `segments` are of that kind alone.",
				"`namespace`, `arguments`, `zones`, `bypass`, `address`, `rules` and `rules-file` are of kind `netfilter` alone. Kind `forward` has none of the fields below `kind`.",
				"Each of `arguments` is a variable in the rules (`$guest`) and the packet mark of its visits' packets. A name has letters, digits and underscores, and starts with a letter. Values are 1 to 4294967295, each once; a function has at most " + strconv.Itoa(model.ArgumentsMax) + ".",
				"`run`, `back`, `connect`, `other` and `limits` are of kind `stream` alone, which needs `run` ([how to](../how-to/streams.md)). Its interface on the node is `wss-NAME`.",
				"The interfaces of a `netfilter` function on its node are `wsi-NAME` (to it) and `wso-NAME` (from it); of a long name, its first four characters and a hash.",
				"`attach: local` needs `recognise: metadata`; `rewrites: true` needs it too; `recognise: metadata` needs `segments: keep`.",
				"A function is local with `attach: local` or `namespace: node`. No chain ends at the node of a local function that its packets go through.",
				"A chain whose `match` has a `priority` goes through no local function, and a chain with `own-traffic` through none on its headends.",
				"A function that is in no chain is a warning.",
			},
		},
		{
			Path: "functions[].attach", Title: "functions: attach",
			Text: "Where a function of kind `unaware` is: the word `local` for the node's own kernel, or a mapping for a function behind interfaces.",
			Rules: []string{
				"`to` and `from` may be the same device. No other function and no `interfaces` entry of the node has them.",
			},
		},
		{
			Path: "functions[].limits", Title: "functions: limits",
			Text: "What connections through a function of kind `stream` may take.",
		},
		{
			Path: "functions[].cache", Title: "functions: cache",
			Text: "How many outer headers the node keeps for packets that are in the function: give `size`, or `rate` and `delay`, from which it follows (rate × delay × 2, at least 1024).",
			Rules: []string{
				"`size` and `rate` with `delay` exclude each other. `delay` is less than the function's `lifetime`.",
				"All functions of a node together keep at most " + strconv.Itoa(model.CacheMax) + " headers by content, and " + strconv.Itoa(model.SlotsMax) + " by metadata.",
			},
		},
		{
			Path: "chains[]", Title: "chains",
			Text: "A chain takes packets that match from its headends through its functions, in this order, to its egress.",
			Rules: []string{
				"A chain with functions of kind `stream` has `direction: both` and no match by mark, and visits each of them once. It is cut at them into parts, each a path of its own, which begins and ends at different nodes.",
				"A chain has at least one function, and at most " + strconv.Itoa(model.SegmentsMax-1) + " functions and waypoints. A function may occur more than once.",
				"The egress is not an ingress of the same chain.",
				"`seal: true` is for chains that rules of [services](#services) name. Functions of kind `stream` on one are `intrusive`, and an `intrusive` function is on such chains alone ([ADR 0085](../adr/0085-a-part-is-sealed-between-its-two-ends.md)).",
				"`direction: both` needs exactly one ingress.",
				"The ingress nodes of a chain have at most " + strconv.Itoa(model.LanesMax) + " `cpus` together.",
				"Where a core interface of the chain's nodes declares an `mtu`, at least 1280 bytes have to remain for the packet inside: an MTU of 1280 plus the headers' length, which `waystamp plan` prints.",
				"Where two chains match the same packet, every ingress of the one that is tried later is an ingress of the one that is tried first: else honest packets would be refused at the egress. With `own-traffic` the same holds for own traffic.",
				"A change of ingress, functions, egress, nodes, `scheme`, `encapsulation` or `window` gives the path a new epoch and new secrets.",
			},
		},
		{
			Path: "chains[].functions[]", Title: "chains: functions",
			Text: "An entry is the name of a function, `{name: FUNCTION, argument: NAME}` for a function of kind `netfilter`, or a waypoint: a segment that is not waystamp's, such as the End of a plain router.",
			Rules: []string{
				"The argument is in the lowest 32 bits of the SID, where every capture shows it. The node takes it from its plan, and refuses a packet whose SID has another (`argument`). With `sids: compressed` the list has no room for it: there it is in the plans alone.",
				"With `zones: argument`, a chain does not visit a function twice with the same argument.",
				"A waypoint has no position in the proof: that a packet visited it is not proven.",
				"A waypoint's SID is within the block, outside of the locators of all nodes, and not the block's first /64.",
			},
		},
		{
			Path: "chains[].match", Title: "chains: match",
			Text: "The packets that a chain takes. All conditions have to hold. The reverse direction exchanges source and destination, ports too.",
			Rules: []string{
				"A match has a `destination`, a `source` or a `priority`; all prefixes of one match are of one version of IP. A match without prefixes is of IPv6.",
				"A match by `protocol`, ports, `dscp` or `mark` needs a `priority`. Ports need a `protocol` that has them: tcp, udp, sctp, dccp, udplite.",
				"Matches with a priority are tried first, the lowest number first. Matches without one are tried last: the longest destination prefix wins, then the longest source prefix.",
				"Two chains that overlap do not have the same priority. Two chains with equal prefixes and no priority share neither ingress nor egress.",
				"One node takes part as headend and egress in at most " + strconv.Itoa(model.OrderedMax) + " matches with a priority.",
				"A prefix does not overlap the block, and is neither link-local, loopback nor multicast.",
				"A fragment carries no ports. If a match by ports could apply to it, it is refused (`ports-unread`, `unproven`) rather than sent through another chain ([ADR 0036](../adr/0036-who-hides-ports-does-not-choose.md)).",
				"The guard at the egress sees no marks: a chain by `mark` steers, and does not require.",
			},
		},
		{
			Path: "chains[].encapsulation", Title: "chains: encapsulation",
			Text: "What the headend puts around packets ([ADR 0014](../adr/0014-compressed-sids-are-a-property-of-the-path.md), [ADR 0067](../adr/0067-labels-are-another-spelling-of-sids.md)).",
			Rules: []string{
				"`sids: compressed` and `reduced` are of type `srv6`. So are waypoints, `own-traffic`, matches by `mark`, and functions but those of kind `forward` and those of kind `unaware` that are recognised by content, with `segments: cut`.",
				"Super-packets (TSO, GRO) are cut into frames before they get labels ([ADR 0080](../adr/0080-super-packets-are-cut-before-they-get-labels.md)).",
			},
		},
		{
			Path: "chains[].proof", Title: "chains: proof",
			Text: "How the chain is proven, and what the egress does with a packet that is not ([SECURITY](../../SECURITY.md#what-each-scheme-promises)).",
			Rules: []string{
				"`keyed-flow` goes with no function that `rewrites`.",
			},
		},
		{
			Path: "clients[]", Title: "clients",
			Text: "Holders of certificates of one authority, who may use services.",
			Rules: []string{
				"Files are on the node of the gateway, and are read there: no plan has a key. Their names count from the root, or from the folder of the agent's `--gateway-files`.",
			},
		},
		{
			Path: "clients[].identity", Title: "clients: identity",
			Text: "Which subject alternative name of a certificate says who its holder is. A certificate has exactly one of the kind, and the domain is one's own: `spiffe: staff.example` takes `spiffe://staff.example/ops/alice`.",
			Rules: []string{
				"One kind.",
			},
		},
		{
			Path: "clients[].revocation", Title: "clients: revocation",
			Text: "What ends a certificate before its time ([ADR 0073](../adr/0073-a-gateway-asks-again.md)).",
			Rules: []string{
				"`crl` with `older-than`, or `lifetime`, or all three.",
			},
		},
		{
			Path: "services[]", Title: "services",
			Text: "What clients reach through a gateway, which knows them by their certificates and chooses a chain for each request ([how to](../how-to/gateway.md), [ADR 0074](../adr/0074-ports-say-which-chain.md)).",
			Rules: []string{
				"A chain that rules name has no `match`. It takes connections of the gateway alone, and `direction: both`; its one ingress is the gateway's node. Its proofs are of scheme `keyed-flow`, which is its default, over SRv6; it has neither `own-traffic` nor `on-violation: report` nor a `guard` but `enforce`.",
				"Such a chain has no function in the node's own kernel, and none that `rewrites`; functions of kind `stream` only with `seal: true`, if they are `intrusive`.",
				"A chain leads to one origin, and at most " + strconv.Itoa(model.OnwardChainsMax) + " chains to the same one. Each has " + strconv.Itoa(model.OnwardPorts) + " source ports of its own: so many connections to an origin can be open for one client's address by one chain.",
				"Services of one gateway have different hosts, also at different addresses.",
				"The egress refuses packets to the address and port of an origin that did not come by a chain of its services, on whatever interface. Other ports of the origin are not guarded.",
				"A match with priority 1 or 2 does not take packets to an origin, or from it.",
			},
		},
		{
			Path: "services[].gateway", Title: "services: gateway",
			Text: "Where the service's gateway is.",
		},
		{
			Path: "services[].certificate", Title: "services: certificate",
			Text: "What the gateway shows to clients. It is for all hosts of the service. Nobody but its owner may read the key's file.",
		},
		{
			Path: "services[].origin", Title: "services: origin",
			Text: "Where requests go on to. The gateway's packets come from the client's address, and from a port of the chain.",
			Rules: []string{
				"Its address is of the same version of IP as the gateway's.",
			},
		},
		{
			Path: "services[].origin.tls", Title: "services: origin: tls",
			Text: "The gateway verifies the origin. An origin without TLS is not there yet: its egress would have to seal the way to it.",
		},
		{
			Path: "services[].rules[]", Title: "services: rules",
			Text: "The first rule that matches a request decides; without one the request is refused (403, `rule-none`).",
			Rules: []string{
				"In patterns `*` stands for one segment, `**` at the end for one or more. Segments of a path and of an identity of kind `spiffe` or `uri` are between slashes; `*@example.org` and `*.example.org` are for mail addresses and for one label of a host.",
				"A path is compared as it goes on: decoded once, without dot segments.",
				"A rule that no request reaches is an error: an earlier one takes all of its requests.",
			},
		},
		{
			Path: "lab", Title: "lab",
			Text: "What `waystamp lab up` builds around the nodes, all in network namespaces of one machine. Every interface of every node has its link here, and every function behind interfaces its entry.",
			Rules: []string{
				"Nodes, hosts, routers and functions of a lab have names of their own: each becomes a namespace.",
				"The end of a link at A towards B is the device `A-B`: it has at most " + strconv.Itoa(model.InterfaceNameMax) + " characters, and at a node it is one of the node's `interfaces`, with the role `edge` towards a host and `core` otherwise.",
				"An `mtu` of a node's interface is that of its link.",
			},
		},
		{
			Path: "lab.hosts[]", Title: "lab: hosts",
			Text:  "End systems behind an edge interface. The node's end of the link has address 1 of each prefix, the host address 2 and a default route.",
			Rules: []string{"Prefixes of hosts do not overlap each other, the block, or the address of a node or router."},
		},
		{
			Path: "lab.routers[]", Title: "lab: routers",
			Text: "Plain Linux routers between the nodes. They run the kernel's own SRv6 End, and no waystamp.",
		},
		{
			Path: "lab.links[]", Title: "lab: links",
			Text: "veth pairs between nodes and routers.",
		},
		{
			Path: "lab.functions[]", Title: "lab: functions",
			Text: "What the functions of kind `unaware` are made of. One behind interfaces gets a namespace of its own; one with `attach: local` is a ruleset in its node's namespace.",
			Rules: []string{
				"`nftables` needs a `ruleset`, and the program `nft`; other kinds have none. A local function is of kind `nftables` and has no `mtu`.",
				"`forward` and `nftables` route, so their function needs `attach.via`.",
			},
		},
	}
}

// Descriptions are those of all fields, by path.
func Descriptions() map[string]Description {
	return map[string]Description{
		"version":      {"", "The version of this format."},
		"domain":       {"", "What all nodes share."},
		"domain.block": {"", "The block that all SIDs are cut from (RFC 8986 section 3.1). It is routable within the domain, and nothing else uses it."},
		"domain.mpls":  {" none", "Labels, for chains of type `sr-mpls`; see [mpls](#domain-mpls)."},
		"nodes":        {"", "The machines of the domain that run waystamp; at least one."},
		"functions":    {" none", "What packets have to visit."},
		"chains":       {" none", "Which packets visit which functions, in which order."},
		"clients":      {" none", "Who may use services."},
		"services":     {" none", "What clients reach through a gateway."},
		"lab":          {" none", "A laboratory around the domain, for `waystamp lab`."},

		"nodes[].name":       {"", "The node's name; chains, functions and commands use it."},
		"nodes[].address":    {"", "The source of the outer headers that this node makes. It is an address of the machine, reachable from all nodes: neither loopback nor link-local."},
		"nodes[].locator":    {"", "The node's part of the block (RFC 8986 section 3.1). The agent adds a route for it; the routing between nodes has to lead it here."},
		"nodes[].cpus":       {strconv.Itoa(model.CPUsDefault), "How many CPUs the machine has, at most. As a headend it gets as many lanes, and replay windows at the egress take memory for each. An agent refuses a plan with fewer lanes than its machine has CPUs."},
		"nodes[].advertise":  {model.AdvertiseLocator.String(), "Which routes the agent adds for routing daemons to announce. `locator`: one for the locator. `sids`: also one for each SID, withdrawn while the SID's function is gone ([how to](../how-to/routing.md))."},
		"nodes[].mpls":       {" none", "The node's label; see [mpls](#nodes-mpls)."},
		"nodes[].interfaces": {"", "The network devices that waystamp attaches to."},

		"domain.mpls.services": {"", "The service label of the block's SID 0."},
		"domain.mpls.mtu":      {" not known", "Bytes behind the Ethernet header, labels included, that every link of the core carries."},

		"nodes[].mpls.label":   {"", "The node's label, the same all over the domain: a prefix SID's index and base in the words of RFC 8402."},
		"nodes[].mpls.address": {"", "An address of the node that the routing of the core leads to, IPv4 or IPv6. Other nodes take the next hop for packets with the node's label from the route to it."},

		"nodes[].interfaces[].name":      {"", "The device, as `ip link` shows it."},
		"nodes[].interfaces[].role":      {"", "`edge` leads outside: chains take what comes in there, and nothing of segment routing passes in or out. `core` leads to other nodes."},
		"nodes[].interfaces[].datapath":  {model.DatapathAuto.String(), "Which hooks the data path uses. `tc` is TC alone. `xdp` is XDP in front of TC, or an error where the device has no native XDP. `auto` is `xdp` on hardware devices that have it, and `tc` otherwise."},
		"nodes[].interfaces[].unmatched": {model.UnmatchedRoute.String(), "What becomes of a packet from outside that no chain takes: `route` sends it on by ordinary routing, `drop` refuses it (`unmatched`)."},
		"nodes[].interfaces[].guard":     {" that of each chain", "What becomes, at this interface, of a packet that a chain ending at the node requires and that has no proof; see `guard` of [chains](#chains). Of the two settings the stricter one counts; only an `edge` interface has one."},
		"nodes[].interfaces[].mtu":       {" not known", "The device's MTU in bytes, for the plan: with it `plan` says what fits into a chain. The agent warns if the device's own is smaller."},

		"functions[].name":       {"", "The function's name."},
		"functions[].node":       {"", "The node that the function is on, or behind."},
		"functions[].kind":       {"", "`forward` is the node itself: the packet passes it and is stamped. `unaware` is a function without segment routing: the node takes the outer header off, hands the packet over, and puts the header back. `netfilter` is the kernel's packet filter, with rules that see the inner packet. `stream` gets the bytes of TCP connections."},
		"functions[].intrusive":  {"false", "Of kind `stream`: it reads payload, and so it is an end of what `seal: true` seals on its chains. It takes sealed connections and nothing else ([how to](../how-to/gateway.md#let-a-function-read-payload))."},
		"functions[].attach":     {" none", "Where the function is; see [attach](#functions-attach)."},
		"functions[].recognise":  {" `content`; `metadata` with `attach: local`", "How a packet that returns finds its header: `content` by addresses, ports and first bytes, `metadata` by an index that stays with the packet in the kernel."},
		"functions[].segments":   {" `cut`; `keep` with `recognise: metadata`", "What becomes of super-packets (GSO): `cut` into frames before the function, or `keep` whole."},
		"functions[].namespace":  {model.NamespaceOwn, "The network namespace that the rules of kind `netfilter` run in: `own` is one that the agent makes, `node` the node's own, a name that of a namespace on the node (`ip netns list`) that somebody else keeps."},
		"functions[].arguments":  {" none", "Names and values of what visits give to the rules."},
		"functions[].zones":      {"none", "`argument` tracks connections of different arguments apart, each in a conntrack zone of its own; the two directions of a chain share one."},
		"functions[].bypass":     {"none", "`established`: packets of flows whose conntrack entry the rules have given the mark `$bypass` go past the function, stamped, from then on."},
		"functions[].address":    {" none", "The source of ICMP errors that the function's own namespace sends."},
		"functions[].rules":      {" none", "The rules, in nft's language: the body of one table of family `inet`, at most " + strconv.Itoa(model.RulesMax>>20) + " MiB."},
		"functions[].rules-file": {" none", "The file that has the rules, instead of `rules`."},
		"functions[].run":        {" none", "What becomes of the bytes towards the server: these functions, one after the other."},
		"functions[].back":       {" `run` in reverse, each one's inverse", "The same towards the client."},
		"functions[].connect":    {"first", "When the client is answered. `first`: when its server has answered, so that one that refuses or is silent shows as it would without the function. `early`: at once, which saves a round trip on long links; a server that refuses shows as a reset."},
		"functions[].other":      {"refuse", "What becomes of packets that are not TCP: `refuse` refuses them (`stream-not-tcp`)."},
		"functions[].limits":     {" none", "What connections may take; see [limits](#functions-limits)."},

		"functions[].limits.connections": {strconv.Itoa(model.StreamConnectionsDefault), "Connections that are open at once; more are reset."},
		"functions[].limits.buffer":      {strconv.Itoa(model.StreamBufferDefault), "Bytes that the function holds for each direction of a connection."},
		"functions[].limits.idle":        {model.StreamIdleDefault.String(), "A connection without a byte for so long is reset."},
		"functions[].limits.half-closed": {model.StreamHalfClosedDefault.String(), "The same, once one side has ended."},

		"functions[].on-unknown": {" `originate` for kind `netfilter` with `namespace: own`; else `drop`", "What becomes of a packet from the function without a kept header: `drop` refuses it (`not-cached`), `plain` routes it without a proof. `originate`, of kind `netfilter` in a namespace other than the node's, sends what the function made itself by the rest of the chain that takes it, with a proof of that part, and refuses what no chain takes (`origin-unmatched`)."},
		"functions[].rewrites":   {"false", "Whether the function changes addresses or ports, as a NAT does."},
		"functions[].cache":      {"{size: " + strconv.Itoa(model.CacheDefault) + "}", "How many headers are kept at once; see [cache](#functions-cache)."},
		"functions[].lifetime":   {model.LifetimeDefault.String(), "How long a header is kept for its packet."},

		"functions[].attach.to":   {"", "The device that packets leave the node by, to the function."},
		"functions[].attach.from": {"", "The device that they come back on."},
		"functions[].attach.via":  {" none", "The function's address on the link of `to`, link-local or not. Needed if the function routes; without it frames are sent as to a bridge. IPv4 packets use it too."},

		"functions[].cache.size":  {" none", "Headers."},
		"functions[].cache.rate":  {" none", "Packets per second through the function."},
		"functions[].cache.delay": {" none", "The time that a packet is in the function under load, queues included."},

		"chains[].name":          {"", "The chain's name. Together with the direction it gives the path id."},
		"chains[].ingress":       {"", "Nodes where packets enter the chain: its headends."},
		"chains[].functions":     {"", "What packets visit, in order: functions, and waypoints between them."},
		"chains[].egress":        {"", "The node where packets leave the chain, and where proofs are verified."},
		"chains[].match":         {" none, for a chain that rules of [services](#services) name", "Which packets the chain takes; see [match](#chains-match)."},
		"chains[].own-traffic":   {"false", "Whether the chain takes packets that its headends originate. Without it such packets leave without a proof, and the egress refuses them (`unproven`)."},
		"chains[].direction":     {"forward", "`both` adds the reverse chain: from the egress through the same functions in the opposite order to the ingress."},
		"chains[].encapsulation": {" as its fields", "Forms of the outer headers; see [encapsulation](#chains-encapsulation)."},
		"chains[].mss-clamp":     {"false", "`true` lowers the MSS in TCP SYNs to what fits the chain, a number to that many bytes. The MSS in a SYN limits the other direction: clamp both, as `direction: both` does."},
		"chains[].guard":         {" that of the interface, or `enforce`", "What becomes at the egress of a packet that the chain requires and that has no proof: `enforce` refuses it (`unproven`, `unverified`), `audit` counts it and forwards it, `off` forwards it. For putting a chain into a network step by step ([how to](../how-to/change-a-chain.md#put-a-chain-into-a-live-network))."},
		"chains[].seal":          {"false", "`true`: the gateway's connections are sealed between the ends of each part, and ends are the gateway, each `intrusive` function and the origin. Functions between see IP and TCP headers over payload that they cannot read. Without an intrusive function it is sealed from the gateway to the origin, as without `seal`."},
		"chains[].proof":         {" as its fields", "Scheme and policy; see [proof](#chains-proof)."},

		"chains[].functions[].name":     {" none", "The function, where the entry has an argument."},
		"chains[].functions[].argument": {" none", "The argument of the visit, one of the function's; in both directions, unless given as `{forward: NAME, reverse: NAME}`."},
		"chains[].functions[].sid":      {" none", "The SID of a waypoint; its lower 64 bits are zero."},

		"chains[].match.destination":      {" any", "Destination prefix of the inner packet. `::/0` is all of IPv6, `0.0.0.0/0` all of IPv4."},
		"chains[].match.source":           {" any", "Source prefix of the inner packet."},
		"chains[].match.priority":         {" none", "Place among the matches with a priority; lower numbers win."},
		"chains[].match.protocol":         {" any", "Upper-layer protocol: a number, or tcp, udp, icmp, icmpv6, sctp, dccp, udplite, gre or esp."},
		"chains[].match.source-port":      {" any", "Source port, or a range of them."},
		"chains[].match.destination-port": {" any", "Destination port, or a range of them."},
		"chains[].match.dscp":             {" any", "Differentiated services code point (RFC 2474)."},
		"chains[].match.mark":             {" any", "The kernel's packet mark when the packet leaves the headend by a `core` interface, as nftables, `SO_MARK` or a cgroup sets it. It has at least one bit set."},

		"chains[].encapsulation.type":    {model.EncapsulationSRv6.String(), "`srv6` is an IPv6 header with a segment list (RFC 8754), `sr-mpls` a stack of labels (RFC 8660), for cores that speak MPLS."},
		"chains[].encapsulation.sids":    {model.SIDsPlain.String(), "`plain` is one SID per entry of the segment list, `compressed` up to five (NEXT-C-SID, RFC 9800 section 4.1)."},
		"chains[].encapsulation.reduced": {"false", "`true` leaves the first segment out of the list: it is in the destination address alone (H.Encaps.Red, RFC 8986 section 5.2)."},

		"chains[].proof.scheme":       {model.SchemeKeyed.String(), "For a chain that rules of [services](#services) name, `keyed-flow` is the default, and nothing else is taken. `keyed` is a chain of SipHash tags with one key per hop; `keyed-flow` binds it to the inner packet's flow; `opot` and `pot` are of draft-ietf-sfc-proof-of-transit-08, with and without masks, and resist no adversary."},
		"chains[].proof.on-violation": {model.OnViolationDrop.String(), "`drop` refuses packets whose proof or segment list is wrong; `report` counts them and lets them go on. Packets without a proof are a matter of `guard`."},
		"chains[].proof.window":       {strconv.Itoa(model.WindowDefault), "How many packet numbers of each lane the replay window tells apart. Larger windows are for networks that reorder more."},

		"clients[].name":       {"", "The name; services use it."},
		"clients[].ca":         {"", "Certificates of authorities, in PEM. Those that have signed themselves are trusted, and the others complete chains to them."},
		"clients[].identity":   {"", "Who a certificate's holder is; see [identity](#clients-identity)."},
		"clients[].revocation": {"", "What ends a certificate before its time; see [revocation](#clients-revocation)."},

		"clients[].identity.spiffe": {" none", "The trust domain of SPIFFE ids."},
		"clients[].identity.email":  {" none", "The domain of mail addresses."},
		"clients[].identity.dns":    {" none", "The domain that names of hosts are within."},
		"clients[].identity.uri":    {" none", "What URIs begin with."},

		"clients[].revocation.crl":        {" none", "Lists of revoked certificates (RFC 5280), PEM or DER, one for each authority. It is read again when the file changes."},
		"clients[].revocation.older-than": {" none", "A list of before is none, and who is missing a list is refused."},
		"clients[].revocation.lifetime":   {" any", "A certificate that lives longer is refused, whatever it has left."},

		"services[].name":        {"", "The service's name; the audit log has it."},
		"services[].hosts":       {"", "Names that clients know it by: of TLS (SNI), and of each request. At most " + strconv.Itoa(model.HostsMax) + "."},
		"services[].gateway":     {"", "Where the gateway is; see [gateway](#services-gateway)."},
		"services[].certificate": {"", "What the gateway shows to clients; see [certificate](#services-certificate)."},
		"services[].clients":     {"", "Who may use the service."},
		"services[].origin":      {"", "Where requests go on to; see [origin](#services-origin)."},
		"services[].rules":       {"", "Which requests are let in, and by which chain; see [rules](#services-rules). At most " + strconv.Itoa(model.ServiceRulesMax) + "."},

		"services[].gateway.nodes":   {"", "The node of the gateway: one, which is the ingress of all chains that the rules name."},
		"services[].gateway.address": {"", "Where clients connect to. The gateway takes what comes in for it at `edge` interfaces of its node."},
		"services[].gateway.mode":    {"transparent", "`transparent`: the address is the service's own, and the node has it on no interface."},

		"services[].certificate.file": {"", "The certificate, and those between it and its root, in PEM."},
		"services[].certificate.key":  {"", "Its private key, in PEM."},

		"services[].origin.address":  {"", "The server's address and port, behind the egress of the chains."},
		"services[].origin.tls":      {"", "How the server is known; see [tls](#services-origin-tls)."},
		"services[].origin.tls.ca":   {"", "Certificates of authorities that the server's certificate may be of, in PEM."},
		"services[].origin.tls.name": {"", "The name that it is for (RFC 9525)."},

		"services[].rules[].who":     {"", "Whose requests the rule is for: a pattern of identities."},
		"services[].rules[].hosts":   {" all of the service", "Hosts of the request."},
		"services[].rules[].methods": {" all", "Methods of the request. CONNECT and TRACE are refused for everybody."},
		"services[].rules[].path":    {" all", "The path of the request: a pattern."},
		"services[].rules[].headers": {" any", "Headers that the request has once, with these values."},
		"services[].rules[].chain":   {"", "The chain that the request takes."},

		"lab.mtu":       {strconv.Itoa(mtuDefault), "MTU of links and functions that name none."},
		"lab.hosts":     {" none", "End systems."},
		"lab.routers":   {" none", "Plain routers."},
		"lab.links":     {"", "Links between nodes and routers."},
		"lab.functions": {" none", "What unaware functions are made of."},
		"lab.core":      {model.LabIPv6.String(), "What links between nodes speak. `ipv4`: no IPv6, and static routes to the addresses of labels alone; for chains of type `sr-mpls`, without routers."},
		"lab.routing":   {model.LabStatic.String(), "Where routes of nodes and routers come from. `static`: the lab computes them. `frr`: zebra and bgpd of FRR run in each namespace; IPv4 routes stay static."},

		"lab.hosts[].name":    {"", "The host's name, and its namespace's."},
		"lab.hosts[].node":    {"", "The node that it is behind."},
		"lab.hosts[].prefix":  {"", "The IPv6 prefix of the link."},
		"lab.hosts[].prefix4": {" no IPv4", "The IPv4 prefix of the link."},
		"lab.hosts[].mtu":     {strconv.Itoa(mtuDefault), "MTU of the link."},

		"lab.routers[].name":    {"", "The router's name."},
		"lab.routers[].address": {"", "Its address, outside of the block."},
		"lab.routers[].sids":    {" none", "SIDs at which it runs End, within the block and outside of all locators. Their lower 64 bits are zero."},

		"lab.links[].between": {"", "The two ends, each a node or a router."},
		"lab.links[].mtu":     {" `lab.mtu`", "MTU of the link."},

		"lab.functions[].name":    {"", "A function of kind `unaware`."},
		"lab.functions[].kind":    {"", "`forward` is a namespace that routes from `to` to `from`; `nftables` the same with a ruleset; `raw` a program that copies frames both ways through packet sockets."},
		"lab.functions[].ruleset": {" none", "The ruleset, as `nft -f` reads it."},
		"lab.functions[].mtu":     {" `lab.mtu`", "MTU of the function's links."},
	}
}
