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
			Text: "Settings that all nodes share.",
		},
		{
			Path: "domain.mpls", Title: "domain: mpls",
			Text: "Labels for chains of type `sr-mpls`. A visit has a *service label*: `services` plus the 16 bits of its SID behind the block. Set node labels at [nodes](#nodes-mpls). waystamp runs no protocol to allocate labels: routers of the core need static routes for node labels, or an IGP that uses the same label for a node everywhere (RFC 8402 section 3.1.2).",
			Rules: []string{
				"The 65536 labels from `services` on are service labels. No node has one of them.",
				"A chain of type `sr-mpls` needs an `mtu` here, or one at every core interface of its nodes: routers send no ICMP error for a packet with labels that is too long.",
			},
		},
		{
			Path: "nodes[]", Title: "nodes",
			Text: "A node is a Linux machine that runs `waystamp agent`. Routers in between that only forward IPv6 are not listed.",
			Rules: []string{
				"A node that is an ingress or an egress of a chain needs an interface of each role. A node with a function needs a `core` interface.",
				"Locators are within the block and do not overlap. A locator needs room for one SID per visit: a /56 has 256. SID 0 of the block is not used.",
				"An address is outside of the block, and belongs to one node only.",
				"`advertise: sids` needs a locator of /63 or shorter.",
				"The replay windows of one node take at most 1 GiB; see `cpus` and `proof.window`.",
			},
		},
		{
			Path: "nodes[].mpls", Title: "nodes: mpls",
			Text: "How packets with labels reach the node. A node needs this setting if a chain of type `sr-mpls` visits it or ends there. The domain then needs [mpls](#domain-mpls), too.",
			Rules: []string{
				"Each label and each address belongs to one node only. An address is outside of the block.",
			},
		},
		{
			Path: "nodes[].interfaces[]", Title: "nodes: interfaces",
			Text: "The network devices by which packets of the domain enter and leave the node. waystamp attaches only to these. Do not list a device " +
				"that leads to a function.",
			Rules: []string{
				"List every device that leads outside as `edge`, VLAN interfaces too: packets that enter and leave by devices that are not listed are routed without a check ([SECURITY](../../SECURITY.md#what-waystamp-does-not-promise)).",
				"A device must carry Ethernet frames; the agent refuses tun and WireGuard devices.",
				"Only an `edge` interface may have `unmatched` and `guard`.",
			},
		},
		{
			Path: "functions[]", Title: "functions",
			Text: "A function is a place that packets of a chain have to visit. [The how-to](../how-to/functions.md) describes functions of kind `unaware`, [netfilter](../how-to/netfilter.md) and [streams](../how-to/streams.md) the other kinds.",
			Rules: []string{
				"`attach` is required for kind `unaware`. Only this kind may have `attach`, `recognise` and `segments`.",
				"Kind `unaware` with `intrusive: true` has `attach` and `limits`, and none of the fields between: connections are opened through it in plain, at port " + strconv.Itoa(model.StreamPlainPort) + ". `to` and `from` are two devices, which the function has for itself, and `via` is its link-local address on both ([how to](../how-to/gateway.md#let-a-tool-read-payload)).",
				"Kind `netfilter` with `intrusive: true` has `rules` or `rules-file`, and `limits`; its `namespace` is `own` ([ADR 0133](../adr/0133-rules-of-netfilter-read-plain-connections.md)).",
				"Only kind `netfilter` may have `namespace`, `arguments`, `zones`, `bypass`, `address`, `rules` and `rules-file`. Kind `forward` has none of the fields below `kind`.",
				"Each of `arguments` is a variable in the rules (`$guest`). Its value is the packet mark of packets on visits with this argument. A name has letters, digits and underscores, and starts with a letter. Values are 1 to 4294967295, each once; a function has at most " + strconv.Itoa(model.ArgumentsMax) + ".",
				"Only kind `stream` may have `run`, `back`, `connect`, `other` and `limits`; `run` is required ([how to](../how-to/streams.md)). The interface of the function on its node is `wss-NAME`.",
				"The interfaces of a `netfilter` function on its node are `wsi-NAME` (to the function) and `wso-NAME` (from the function). A long name is shortened to its first four characters and a hash.",
				"`attach: local` needs `recognise: metadata`; `rewrites: true` needs it too; `recognise: metadata` needs `segments: keep`.",
				"A function is local with `attach: local` or `namespace: node`. A chain must not end at the node of a local function that its packets pass.",
				"A chain with a `priority` in its `match` must not visit a local function. A chain with `own-traffic` must not visit a local function on one of its headends.",
				"A function that is in no chain is a warning.",
			},
		},
		{
			Path: "functions[].attach", Title: "functions: attach",
			Text: "Where a function of kind `unaware` is: the word `local` for the node's own kernel, or a mapping for a function behind interfaces.",
			Rules: []string{
				"`to` and `from` may be the same device. No other function and no `interfaces` entry of the node may name them.",
			},
		},
		{
			Path: "functions[].limits", Title: "functions: limits",
			Text: "Limits on connections through a function of kind `stream`.",
		},
		{
			Path: "functions[].cache", Title: "functions: cache",
			Text: "How many outer headers the node keeps for packets that are in the function. Give `size`, or `rate` and `delay`; the size is then rate × delay × 2, at least 1024.",
			Rules: []string{
				"`size` and `rate` with `delay` exclude each other. `delay` is less than the function's `lifetime`.",
				"All functions of a node together keep at most " + strconv.Itoa(model.CacheMax) + " headers by content, and " + strconv.Itoa(model.SlotsMax) + " by metadata.",
			},
		},
		{
			Path: "chains[]", Title: "chains",
			Text: "A chain steers packets that match from its headends through its functions, in the given order, to its egress.",
			Rules: []string{
				"A chain with functions of kind `stream` has `direction: both` and no match by mark, and visits each of them once. These functions divide the chain into parts. Each part is a path of its own, and begins and ends at different nodes.",
				"A chain has at least one function, and at most " + strconv.Itoa(model.SegmentsMax-1) + " functions and waypoints. A function may occur more than once.",
				"The egress is not an ingress of the same chain.",
				"`seal: true` is for chains in rules of [services](#services). Functions of kind `stream` on such a chain must be `intrusive`, and an `intrusive` function may be only on such chains ([ADR 0085](../adr/0085-a-part-is-sealed-between-its-two-ends.md)).",
				"`direction: both` needs exactly one ingress.",
				"The ingress nodes of a chain have at most " + strconv.Itoa(model.LanesMax) + " `cpus` together.",
				"If a core interface of the chain's nodes declares an `mtu`, at least 1280 bytes must remain for the inner packet. So the MTU must be 1280 plus the headers' length, which `waystamp plan` prints.",
				"If two chains match the same packet, every ingress of the chain that is tried later must also be an ingress of the chain that is tried first: otherwise the egress would refuse legitimate packets. With `own-traffic` this also holds for own traffic.",
				"A change of ingress, functions, egress, nodes, `scheme`, `encapsulation` or `window` gives the path a new epoch and new secrets.",
			},
		},
		{
			Path: "chains[].functions[]", Title: "chains: functions",
			Text: "An entry is the name of a function, `{name: FUNCTION, argument: NAME}` for a function of kind `netfilter`, `{name: FUNCTION, parameters: NUMBER}` for a function of kind `stream`, or a waypoint: a segment of a router that does not run waystamp, such as its End SID.",
			Rules: []string{
				"The lowest 32 bits of the SID contain the argument, so captures show it. The node takes the argument from its plan, and refuses a packet with another argument in the SID (`argument`). With `sids: compressed` the segment list has no room for the argument: only the plans contain it.",
				"The lowest 48 bits of the SID contain the parameters of a visit to a function of kind `stream`. An operation of the function takes them ([how to](../how-to/streams.md#give-visits-parameters)); parameters that no operation takes are refused. Each pair of parameters has an instance of the function, with a worker and limits of its own, whose name is the function's and the parameters, such as `zip:0x2a` ([ADR 0144](../adr/0144-parameters-of-a-visit-make-an-instance.md)). A packet with other parameters in its SID is refused (`segments`). With `sids: compressed` and over labels there is no room for them: only the plans contain them.",
				"With `zones: argument`, a chain must not visit a function twice with the same argument.",
				"A waypoint has no position in the proof: the proof does not show whether a packet visited it.",
				"A waypoint's SID is within the block, outside of the locators of all nodes, and not the block's first /64.",
			},
		},
		{
			Path: "chains[].return", Title: "chains: return",
			Text: "The functions that answers of a chain with functions of kind `stream` pass, instead of those of the chain in reverse order ([how to](../how-to/streams.md#let-answers-take-other-functions)).",
			Rules: []string{
				"It needs `direction: both`. The chain has no waypoints and no arguments, and no rule of [services](#services) names it.",
			},
		},
		{
			Path: "chains[].return.functions[]", Title: "chains: return: functions",
			Text: "An entry is the name of a function, or `{name: FUNCTION, parameters: NUMBER}` for a function of kind `stream`.",
			Rules: []string{
				"The way back has the parameters that are given here, and none of the chain's `functions`.",
			},
		},
		{
			Path: "chains[].match", Title: "chains: match",
			Text: "The packets that a chain takes. A packet matches if all conditions hold. The reverse direction exchanges source and destination, ports too.",
			Rules: []string{
				"A match has a `destination`, a `source` or a `priority`; all prefixes of one match are of the same IP version. A match without prefixes is for IPv6.",
				"A match by `protocol`, ports, `dscp` or `mark` needs a `priority`. Ports need a `protocol` that has them: tcp, udp, sctp, dccp, udplite.",
				"Matches with a priority are tried first, the lowest number first. Matches without a priority are tried last: the longest destination prefix wins, then the longest source prefix.",
				"Two chains that overlap must not have the same priority. Two chains with equal prefixes and no priority must not share an ingress or an egress.",
				"One node may be headend or egress of at most " + strconv.Itoa(model.OrderedMax) + " matches with a priority.",
				"A prefix must not overlap the block, and must not be link-local, loopback or multicast.",
				"A fragment carries no ports. If a match by ports could apply to a fragment, the fragment is refused (`ports-unread`, `unproven`), not sent through another chain ([ADR 0036](../adr/0036-who-hides-ports-does-not-choose.md)).",
				"Packets do not carry marks to the egress: a chain by `mark` steers packets, but the guard does not require a proof for it.",
			},
		},
		{
			Path: "chains[].encapsulation", Title: "chains: encapsulation",
			Text: "The outer headers that the headend adds to packets ([ADR 0014](../adr/0014-compressed-sids-are-a-property-of-the-path.md), [ADR 0067](../adr/0067-labels-are-another-spelling-of-sids.md)).",
			Rules: []string{
				"Only type `srv6` supports `sids: compressed`, `reduced` and waypoints. Type `sr-mpls` supports no `segments: keep` with `recognise: content`.",
				"Super-packets (TSO, GRO) are segmented into frames before they get labels ([ADR 0080](../adr/0080-super-packets-are-cut-before-they-get-labels.md)).",
			},
		},
		{
			Path: "chains[].proof", Title: "chains: proof",
			Text: "How the chain is proven, and what the egress does with a packet that fails the proof ([SECURITY](../../SECURITY.md#what-each-scheme-promises)).",
			Rules: []string{
				"A chain with a function that `rewrites` must not use `keyed-flow`.",
			},
		},
		{
			Path: "clients[]", Title: "clients",
			Text: "Clients with certificates of the same authorities. Services and rules refer to them.",
			Rules: []string{
				"The gateway reads the files on its node; no plan has a key. File names are relative to the root directory, or to the folder of the agent's `--gateway-files`.",
			},
		},
		{
			Path: "clients[].identity", Title: "clients: identity",
			Text: "The kind of subject alternative name that identifies a certificate's holder, and the domain of these names. A certificate must have exactly one name of the kind, in that domain: `spiffe: staff.example` accepts `spiffe://staff.example/ops/alice`.",
			Rules: []string{
				"There is exactly one kind.",
			},
		},
		{
			Path: "clients[].revocation", Title: "clients: revocation",
			Text: "The ways to end a certificate before its expiry ([ADR 0073](../adr/0073-a-gateway-asks-again.md)).",
			Rules: []string{
				"There is `crl` with `older-than`, or `ocsp: true`, or `lifetime`, or several of them. A certificate has to keep all that there are, and so has each authority's between it and its root.",
				"`responder` is only with `ocsp: true`.",
			},
		},
		{
			Path: "services[]", Title: "services",
			Text: "Servers that clients reach through a gateway. The gateway authenticates clients by their certificates, and selects a chain for each request ([how to](../how-to/gateway.md), [ADR 0074](../adr/0074-ports-say-which-chain.md)).",
			Rules: []string{
				"A chain in a rule has no `match`: it takes only connections of the gateway. It has `direction: both`, one ingress, the gateway's node, and proofs of scheme `keyed-flow`, its default. It has no `own-traffic` and no `on-violation: report`; its `guard` is `enforce`.",
				"A chain in a rule has no function in the node's own kernel, and no function that `rewrites`. It has functions of kind `stream` only if they are `intrusive` and the chain has `seal: true`.",
				"A chain leads to one origin. At most " + strconv.Itoa(model.OnwardChainsMax) + " chains lead to the same origin. Each chain has " + strconv.Itoa(model.OnwardPorts) + " source ports of its own: one client address can have this many connections to an origin by one chain.",
				"Services of one gateway have different hosts, even if their addresses differ.",
				"The egress refuses packets to the address and port of an origin unless they came by a chain of the origin's services, on every interface. It does not guard other ports of the origin.",
				"A match with priority 1 or 2 does not take packets to an origin, or from it.",
			},
		},
		{
			Path: "services[].gateway", Title: "services: gateway",
			Text: "The node and the address of the service's gateway.",
		},
		{
			Path: "services[].certificate", Title: "services: certificate",
			Text: "The gateway's certificate for clients. It must be valid for all hosts of the service. Only its owner may have access to the key's file.",
			Rules: []string{
				"There is `key` or `signer`, and not both.",
			},
		},
		{
			Path: "services[].client-headers", Title: "services: client-headers",
			Text: "The names of the headers by which the origin hears who a client is. What clients send under these names, or under names that many read as the same (underscores for hyphens), is removed ([ADR 0132](../adr/0132-who-the-client-is-by-names-of-the-file.md)).",
			Rules: []string{
				"There is at least one. Without `client-headers` there is `certificate: Client-Cert`.",
				"Rules look at no header of these names.",
			},
		},
		{
			Path: "services[].origin", Title: "services: origin",
			Text: "The server that receives the requests. The source of the gateway's packets is the client's address, with a port of the chain.",
			Rules: []string{
				"Its address has the same IP version as the gateway's.",
			},
		},
		{
			Path: "services[].origin.tls", Title: "services: origin: tls",
			Text: "The settings to verify the origin's certificate. Origins without TLS are not supported yet: the egress would have to seal the connection to the origin.",
		},
		{
			Path: "services[].destinations[]", Title: "services: destinations",
			Text: "What clients of a gateway in mode `connect` may ask for, and where it leads ([how to](../how-to/gateway.md#be-a-proxy), [ADR 0118](../adr/0118-a-proxy-opens-what-the-file-names.md)). The gateway answers 403 to any other name, port or address.",
			Rules: []string{
				"A service in mode `connect` has `destinations` and no `origin`, `protocol` or `alpn`. Its rules have `who`, `to` and `chain` alone; its chains have no `seal`.",
				"Its `hosts` are the names of the proxy itself.",
			},
		},
		{
			Path: "services[].rules[]", Title: "services: rules",
			Text: "The first rule that matches a request decides. If no rule matches, the gateway refuses the request (403, `rule-none`).",
			Rules: []string{
				"In patterns `*` stands for one segment, `**` at the end for one or more. Segments of a path and of an identity of kind `spiffe` or `uri` are between slashes; `*@example.org` and `*.example.org` are for mail addresses and for one label of a host.",
				"A path is compared in the form that the origin receives: decoded once, without dot segments.",
				"A rule is an error if an earlier rule matches all of its requests.",
			},
		},
		{
			Path: "lab", Title: "lab",
			Text: "The hosts, links and functions that `waystamp lab up` builds around the nodes, all in network namespaces of one machine. Every interface of every node needs a link here, and every function behind interfaces an entry.",
			Rules: []string{
				"Names of nodes, hosts, routers and functions of a lab are unique: each becomes the name of a namespace.",
				"The end of a link at A towards B is the device `A-B`: it has at most " + strconv.Itoa(model.InterfaceNameMax) + " characters, and at a node it is one of the node's `interfaces`, with the role `edge` towards a host and `core` otherwise.",
				"If an interface of a node has an `mtu`, it must be the MTU of its link.",
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
			Text: "How the lab builds functions of kind `unaware`. A function behind interfaces gets a namespace of its own; a function with `attach: local` is a ruleset in its node's namespace.",
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
		"domain":       {"", "Settings that all nodes share."},
		"domain.block": {"", "The block that contains all SIDs (RFC 8986 section 3.1). It must be routable within the domain, and must not be used for anything else."},
		"domain.mpls":  {" none", "Labels, for chains of type `sr-mpls`; see [mpls](#domain-mpls)."},
		"nodes":        {"", "The machines of the domain that run waystamp; at least one."},
		"functions":    {" none", "Functions that packets of chains visit."},
		"chains":       {" none", "Which packets visit which functions, in which order."},
		"clients":      {" none", "Clients that may use services."},
		"services":     {" none", "Servers that clients reach through a gateway."},
		"lab":          {" none", "A laboratory around the domain, for `waystamp lab`."},

		"nodes[].name":       {"", "The node's name; chains, functions and commands use it."},
		"nodes[].address":    {"", "The source of the outer headers that this node makes. It is an address of the machine, reachable from all nodes: neither loopback nor link-local."},
		"nodes[].locator":    {"", "The node's part of the block (RFC 8986 section 3.1). The agent adds a route for it; the routing between nodes must deliver the locator's packets to this node."},
		"nodes[].cpus":       {strconv.Itoa(model.CPUsDefault), "How many CPUs the machine may have at most. As a headend the node gets one lane per CPU, and replay windows at the egress take memory for each lane. An agent refuses a plan with fewer lanes than its machine has CPUs."},
		"nodes[].advertise":  {model.AdvertiseLocator.String(), "Which routes the agent adds for routing daemons to announce. `locator`: one for the locator. `sids`: also one for each SID, removed while an interface of the SID's function is missing ([how to](../how-to/routing.md))."},
		"nodes[].mpls":       {" none", "The node's label; see [mpls](#nodes-mpls)."},
		"nodes[].interfaces": {"", "The network devices that waystamp attaches to."},

		"domain.mpls.services": {"", "The service label of the block's SID 0."},
		"domain.mpls.mtu":      {" not known", "The largest payload of an Ethernet frame, in bytes with labels included, that every link of the core carries."},

		"nodes[].mpls.label":   {"", "The node's label, the same in the whole domain: the SRGB base plus the index of the node's prefix SID (RFC 8402)."},
		"nodes[].mpls.address": {"", "An address of the node that the core routes, IPv4 or IPv6. Other nodes use the next hop of the route to this address for packets with the node's label."},

		"nodes[].interfaces[].name":      {"", "The device, as `ip link` shows it."},
		"nodes[].interfaces[].role":      {"", "`edge` leads outside: chains take packets that arrive there, and packets with SIDs or an SRH are refused in both directions. `core` leads to other nodes."},
		"nodes[].interfaces[].datapath":  {model.DatapathAuto.String(), "Which hooks the data path uses. `tc`: only TC. `xdp`: XDP before TC, or an error if the device has no native XDP. `auto`: `xdp` on hardware devices with native XDP, and `tc` otherwise."},
		"nodes[].interfaces[].unmatched": {model.UnmatchedRoute.String(), "Action for a packet from outside that no chain takes: `route` forwards it by ordinary routing, `drop` refuses it (`unmatched`)."},
		"nodes[].interfaces[].guard":     {" that of each chain", "Action at this interface for a packet without a proof, if a chain that ends at the node requires the packet; see `guard` of [chains](#chains). If the chain has a `guard`, too, the stricter setting applies. Only for `edge` interfaces."},
		"nodes[].interfaces[].mtu":       {" not known", "The device's MTU in bytes. `waystamp plan` uses it to compute the size of packets that fit into a chain. The agent warns if the MTU of the device is smaller."},

		"functions[].name":       {"", "The function's name."},
		"functions[].node":       {"", "The node that the function is on, or behind."},
		"functions[].kind":       {"", "`forward` is the node itself: it stamps and forwards the packet. `unaware` is a function without segment routing: the node removes the outer header, gives the packet to the function, and restores the header. `netfilter` is the kernel's packet filter, with rules for the inner packet. `stream` gets the bytes of TCP connections."},
		"functions[].intrusive":  {"false", "Of kind `stream`, `unaware` or `netfilter`: it reads payload, and so it is an end of what `seal: true` seals on its chains. It takes sealed connections and nothing else ([how to](../how-to/gateway.md#let-a-function-read-payload))."},
		"functions[].attach":     {" none", "Where the function is; see [attach](#functions-attach)."},
		"functions[].recognise":  {" `content`; `metadata` with `attach: local`", "How the node finds the header of a packet that returns: `content` by addresses, ports and first bytes, `metadata` by an index that the kernel keeps with the packet."},
		"functions[].segments":   {" `cut`; `keep` with `recognise: metadata`", "Handling of super-packets (GSO): `cut` segments them into frames before the function, `keep` leaves them whole."},
		"functions[].namespace":  {model.NamespaceOwn, "The network namespace for the rules of kind `netfilter`: `own` is a namespace that the agent makes, `node` is the namespace of the node, and any other name is an existing namespace on the node (`ip netns list`) that the agent does not manage."},
		"functions[].arguments":  {" none", "Names and values of arguments that visits give to the rules."},
		"functions[].zones":      {"none", "`argument` tracks connections of each argument in a conntrack zone of its own; the two directions of a chain share a zone."},
		"functions[].bypass":     {"none", "`established`: packets of flows whose conntrack entry the rules have given the mark `$bypass` go past the function, stamped, from then on."},
		"functions[].address":    {" none", "The source of ICMP errors that the function's own namespace sends."},
		"functions[].rules":      {" none", "The rules, in nft's syntax: the body of one table of family `inet`, at most " + strconv.Itoa(model.RulesMax>>20) + " MiB."},
		"functions[].rules-file": {" none", "A file with the rules, instead of `rules`."},
		"functions[].run":        {" none", "Operations on the bytes towards the server, in this order."},
		"functions[].back":       {" the inverse of each operation in `run`, in reverse order", "Operations on the bytes towards the client, in this order."},
		"functions[].connect":    {"first", "When the node answers a client's SYN. `first`: when the server has answered, so that the client sees a refusing or silent server as without the function. `early`: at once, which saves a round trip on long links; if the server then refuses, the client gets a reset."},
		"functions[].other":      {"refuse", "Action for packets that are not TCP. `refuse`: refuse them (`stream-not-tcp`). `icmp`: echo, and ICMP errors about other packets than TCP, go by the function, in the next part of the chain; others are refused. `relay`: whatever is certainly not TCP goes by; fragments of TCP, TCP behind extension headers and neighbour discovery are refused. Not with `intrusive`."},
		"functions[].limits":     {" none", "Limits on connections; see [limits](#functions-limits)."},

		"functions[].limits.connections": {strconv.Itoa(model.StreamConnectionsDefault), "Connections that may be open at once; further connections are reset."},
		"functions[].limits.buffer":      {strconv.Itoa(model.StreamBufferDefault), "Bytes that the function holds for each direction of a connection."},
		"functions[].limits.idle":        {model.StreamIdleDefault.String(), "A connection that carries no byte for this time is reset."},
		"functions[].limits.half-closed": {model.StreamHalfClosedDefault.String(), "A connection that one side has closed, and that carries no byte for this time, is reset."},

		"functions[].on-unknown": {" `originate` for kind `netfilter` with `namespace: own`; else `drop`", "Action for a packet from the function without a kept header: `drop` refuses it (`not-cached`), `plain` routes it without a proof. `originate`, for kind `netfilter` in a namespace other than the node's, sends a packet that the function made through the rest of the matching chain, with a proof of that part, and refuses it if no chain matches (`origin-unmatched`)."},
		"functions[].rewrites":   {"false", "Whether the function changes addresses or ports, as a NAT does."},
		"functions[].cache":      {"{size: " + strconv.Itoa(model.CacheDefault) + "}", "How many headers are kept at once; see [cache](#functions-cache)."},
		"functions[].lifetime":   {model.LifetimeDefault.String(), "How long a header is kept for its packet."},

		"functions[].attach.to":   {"", "The device through which packets leave the node to the function."},
		"functions[].attach.from": {"", "The device on which packets return from the function."},
		"functions[].attach.via":  {" none", "The function's address on the link of `to`, link-local or not. Required if the function routes; without `via`, frames are sent as to a bridge. IPv4 packets also use this address as next hop."},

		"functions[].cache.size":  {" none", "Headers."},
		"functions[].cache.rate":  {" none", "Packets per second through the function."},
		"functions[].cache.delay": {" none", "The time that a packet is in the function under load, queues included."},

		"chains[].name":                          {"", "The chain's name. Together with the direction it gives the path id."},
		"chains[].ingress":                       {"", "Nodes where packets enter the chain: its headends."},
		"chains[].functions":                     {"", "What packets visit, in order: functions, and waypoints between them."},
		"chains[].egress":                        {"", "The node where packets leave the chain, and where proofs are verified."},
		"chains[].return":                        {" none", "Other functions for the chain's answers; see [return](#chains-return)."},
		"chains[].return.functions":              {"", "What answers visit, in order: all functions of kind `stream` of the chain, in reverse, and any others."},
		"chains[].return.functions[].name":       {"", "The function, for an entry with parameters."},
		"chains[].return.functions[].parameters": {" none", "The parameters of the visit on the way back."},
		"chains[].match":                         {" none, for a chain that rules of [services](#services) name", "Which packets the chain takes; see [match](#chains-match)."},
		"chains[].own-traffic":                   {"false", "Whether the chain takes packets that its headends originate. Without it such packets leave without a proof, and the egress refuses them (`unproven`)."},
		"chains[].direction":                     {"forward", "`both` adds the reverse chain: from the egress through the same functions in the opposite order to the ingress."},
		"chains[].encapsulation":                 {" as its fields", "Format of the outer headers; see [encapsulation](#chains-encapsulation)."},
		"chains[].mss-clamp":                     {"false", "`true` lowers the MSS in TCP SYNs to the size that fits the chain, a number to that many bytes. The MSS in a SYN limits the other direction, so clamp both; `direction: both` does this."},
		"chains[].guard":                         {" that of the interface, or `enforce`", "Action at the egress for a packet that the chain requires and that has no proof: `enforce` refuses it (`unproven`, `unverified`), `audit` counts and forwards it, `off` forwards it. Use `audit` to introduce a chain step by step ([how to](../how-to/change-a-chain.md#put-a-chain-into-a-live-network))."},
		"chains[].seal":                          {"false", "`true`: the gateway's connections are sealed in parts, each between two of: the gateway, an `intrusive` function, the origin. Functions in between see the IP and TCP headers, and cannot read the payload. Without an intrusive function the one part is from the gateway to the origin, as without `seal`."},
		"chains[].proof":                         {" as its fields", "Scheme and policy; see [proof](#chains-proof)."},

		"chains[].functions[].name":       {" none", "The function, for an entry with an argument or parameters."},
		"chains[].functions[].argument":   {" none", "The argument of the visit: a name in the function's `arguments`. It applies to both directions, unless you write `{forward: NAME, reverse: NAME}`."},
		"chains[].functions[].parameters": {" none", "The parameters of the visit, for the operations of the function. They apply to both directions, unless you write `{forward: NUMBER, reverse: NUMBER}`, or the chain has `return`."},
		"chains[].functions[].sid":        {" none", "The SID of a waypoint; its lower 64 bits are zero."},

		"chains[].match.destination":      {" any", "Destination prefix of the inner packet. `::/0` is all of IPv6, `0.0.0.0/0` all of IPv4."},
		"chains[].match.source":           {" any", "Source prefix of the inner packet."},
		"chains[].match.priority":         {" none", "Order among matches with a priority; lower numbers win."},
		"chains[].match.protocol":         {" any", "Upper-layer protocol: a number, or tcp, udp, icmp, icmpv6, sctp, dccp, udplite, gre or esp."},
		"chains[].match.source-port":      {" any", "Source port, or a range of ports."},
		"chains[].match.destination-port": {" any", "Destination port, or a range of ports."},
		"chains[].match.dscp":             {" any", "Differentiated services code point (RFC 2474)."},
		"chains[].match.mark":             {" any", "The kernel's packet mark when the packet leaves the headend by a `core` interface, as nftables, `SO_MARK` or a cgroup sets it. It has at least one bit set."},

		"chains[].encapsulation.type":    {model.EncapsulationSRv6.String(), "`srv6` is an IPv6 header with a segment list (RFC 8754), `sr-mpls` a stack of labels (RFC 8660), for cores that forward MPLS."},
		"chains[].encapsulation.sids":    {model.SIDsPlain.String(), "`plain` is one SID per entry of the segment list, `compressed` up to five (NEXT-C-SID, RFC 9800 section 4.1)."},
		"chains[].encapsulation.reduced": {"false", "`true` leaves the first segment out of the list: only the destination address contains it (H.Encaps.Red, RFC 8986 section 5.2)."},

		"chains[].proof.scheme":       {model.SchemeKeyed.String(), "A chain that rules of [services](#services) name must use `keyed-flow`, which is its default. `keyed` is a chain of SipHash tags with one key per hop; `keyed-flow` also binds the proof to the inner packet's flow; `opot` and `pot` are the schemes of draft-ietf-sfc-proof-of-transit-08, with and without masks, and do not resist an adversary."},
		"chains[].proof.on-violation": {model.OnViolationDrop.String(), "`drop` refuses packets with a wrong proof or segment list; `report` counts and forwards them. For packets without a proof, see `guard`."},
		"chains[].proof.rotate-every": {" none", "How often the controller gives the chain fresh secrets. Chains with the same time take turns within it. Without it the controller's `--rotate-every` applies; without a controller it has no effect."},
		"chains[].proof.window":       {strconv.Itoa(model.WindowDefault), "Packet numbers that the replay window keeps for each lane. Use a larger window if the network reorders more."},

		"clients[].name":       {"", "The name, by which services refer to the clients."},
		"clients[].ca":         {"", "Certificates of authorities, in PEM. Self-signed ones are trusted; the others complete certificate chains to them."},
		"clients[].identity":   {"", "The holder of a certificate; see [identity](#clients-identity)."},
		"clients[].revocation": {"", "The ways to end a certificate before its expiry; see [revocation](#clients-revocation)."},

		"clients[].identity.spiffe": {" none", "The trust domain of SPIFFE ids."},
		"clients[].identity.email":  {" none", "The domain of mail addresses."},
		"clients[].identity.dns":    {" none", "The domain of host names."},
		"clients[].identity.uri":    {" none", "The prefix of URIs."},

		"clients[].revocation.crl":        {" none", "A file of lists of revoked certificates (RFC 5280), in PEM or DER, one list for each authority. The gateway reads the file again when it changes."},
		"clients[].revocation.ocsp":       {"false", "`true`: the gateway's agent asks a responder of OCSP (RFC 6960) about each certificate. An answer is used until its next update; the responder is asked again after 5 minutes while the certificate is in use. Clients about whose certificates no responder tells are refused ([ADR 0131](../adr/0131-the-agent-asks-responders.md))."},
		"clients[].revocation.responder":  {" the one that a certificate names", "The URL of the responder for all certificates, with `http`. Its answers are signed by the certificate's issuer, or by whom the issuer has given a certificate to do so."},
		"clients[].revocation.older-than": {" none, with `ocsp: true` 24h", "The highest age of a list, and of a responder's answer. An older list or answer is not used, and clients of an authority without a list are refused."},
		"clients[].revocation.lifetime":   {" any", "The highest lifetime of a certificate. The gateway refuses one with a longer lifetime, even if it expires soon."},

		"services[].name":           {"", "The service's name, which is also in the audit log."},
		"services[].hosts":          {"", "The service's host names, in TLS (SNI) and in each request. At most " + strconv.Itoa(model.HostsMax) + "."},
		"services[].gateway":        {"", "The node and the address of the gateway; see [gateway](#services-gateway)."},
		"services[].certificate":    {"", "The gateway's certificate for clients; see [certificate](#services-certificate)."},
		"services[].clients":        {"", "The clients that may use the service."},
		"services[].client-headers": {" `{certificate: Client-Cert}`, with `protocol: http`", "The headers by which the origin hears who a client is; see [client-headers](#services-client-headers)."},

		"services[].client-headers.certificate": {" none", "The client's certificate in base64 between colons (RFC 9440)."},
		"services[].client-headers.pem":         {" none", "The client's certificate in PEM, percent-encoded, as nginx's `$ssl_client_escaped_cert` has it."},
		"services[].client-headers.identity":    {" none", "The client's identity, as rules see it."},
		"services[].client-headers.serial":      {" none", "The serial number of the client's certificate, hexadecimal."},
		"services[].origin":                     {" none, in mode `connect`", "The server that receives the requests; see [origin](#services-origin)."},
		"services[].destinations":               {" none, except in mode `connect`", "What clients of a proxy may ask for; see [destinations](#services-destinations). At most " + strconv.Itoa(model.DestinationsMax) + "."},

		"services[].destinations[].host":    {"", "The name of the host that clients ask for. The gateway does not resolve it."},
		"services[].destinations[].port":    {" that of the address", "The port that clients ask for."},
		"services[].destinations[].address": {"", "The address and port to which the gateway connects, behind the egress of the chains."},
		"services[].rules":                  {"", "The requests that the gateway accepts, and their chains; see [rules](#services-rules). At most " + strconv.Itoa(model.ServiceRulesMax) + "."},

		"services[].protocol": {"http", "What clients and the origin speak inside of TLS: `http`, HTTP/1.1 and HTTP/2, or `tls`, anything else. With `tls` the gateway does not read the bytes; it carries each connection by the chain of the first rule that matches, and rules have no `methods`, `path` or `headers`."},
		"services[].alpn":     {" none", "Of a service with `protocol: tls`: names of protocols (ALPN, RFC 7301). A client has to offer one of them, and the origin has to accept the same one. Without, neither is asked. At most " + strconv.Itoa(model.ALPNMax) + "."},
		"services[].idle":     {" 1h, with `protocol: tls`", "Of a service with `protocol: tls`: the time after which the gateway ends a connection without a byte in either direction."},

		"services[].gateway.nodes":   {"", "The node of the gateway: exactly one. It is the ingress of all chains in the rules."},
		"services[].gateway.address": {"", "The address and port to which clients connect. The gateway receives their packets on `edge` interfaces of its node."},
		"services[].gateway.mode":    {"transparent", "`transparent`: the address belongs to the service, and no interface of the node has it. `own`: the address is one of the node's. `connect`: the same, and the gateway is a proxy: its clients name one of the `destinations` by CONNECT (RFC 9110 section 9.3.6)."},

		"services[].certificate.file":   {"", "The certificate, and the intermediate certificates to its root, in PEM."},
		"services[].certificate.key":    {" none", "Its private key, in PEM."},
		"services[].certificate.signer": {" none", "A unix socket on the gateway's node, at which another process signs handshakes with the key ([how to](../how-to/gateway.md#keep-the-key-out-of-the-gateway), [protocol](../protocol/signer.md)). Clients that come while it does not sign are refused."},

		"services[].origin.address":  {"", "The server's address and port, behind the egress of the chains."},
		"services[].origin.tls":      {"", "The settings to verify the server; see [tls](#services-origin-tls)."},
		"services[].origin.tls.ca":   {"", "Certificates of the authorities that may issue the server's certificate, in PEM."},
		"services[].origin.tls.name": {"", "The name in the server's certificate (RFC 9525)."},

		"services[].rules[].who":     {"", "A pattern of the identities whose requests match."},
		"services[].rules[].hosts":   {" all of the service", "Hosts of the request."},
		"services[].rules[].methods": {" all", "Methods of the request. The gateway always refuses CONNECT and TRACE."},
		"services[].rules[].path":    {" all", "The path of the request: a pattern."},
		"services[].rules[].headers": {" any", "Headers, each of which the request must have exactly once, with this value."},
		"services[].rules[].to":      {" none, except in mode `connect`", "Destinations that match, each with its port: `[git.example.org:22]`. All have one address."},
		"services[].rules[].chain":   {"", "The chain that the request takes."},

		"lab.mtu":       {strconv.Itoa(mtuDefault), "MTU of links and functions without an `mtu` of their own."},
		"lab.hosts":     {" none", "End systems."},
		"lab.routers":   {" none", "Plain routers."},
		"lab.links":     {"", "Links between nodes and routers."},
		"lab.functions": {" none", "How functions of kind `unaware` are built."},
		"lab.core":      {model.LabIPv6.String(), "IP version on links between nodes. `ipv4`: no IPv6, and static routes only to the addresses of `mpls`; for chains of type `sr-mpls`, without routers."},
		"lab.routing":   {model.LabStatic.String(), "Source of the routes of nodes and routers. `static`: the lab computes them. `frr`: zebra and bgpd of FRR run in each namespace; IPv4 routes stay static."},

		"lab.hosts[].name":    {"", "The host's name, and its namespace's."},
		"lab.hosts[].node":    {"", "The node that the host is connected to."},
		"lab.hosts[].prefix":  {"", "The IPv6 prefix of the link."},
		"lab.hosts[].prefix4": {" no IPv4", "The IPv4 prefix of the link."},
		"lab.hosts[].mtu":     {strconv.Itoa(mtuDefault), "MTU of the link."},

		"lab.routers[].name":    {"", "The router's name."},
		"lab.routers[].address": {"", "Its address, outside of the block."},
		"lab.routers[].sids":    {" none", "SIDs at which it runs End, within the block and outside of all locators. Their lower 64 bits are zero."},

		"lab.links[].between": {"", "The two ends, each a node or a router."},
		"lab.links[].mtu":     {" `lab.mtu`", "MTU of the link."},

		"lab.functions[].name":    {"", "A function of kind `unaware`."},
		"lab.functions[].kind":    {"", "`forward` is a namespace that routes from `to` to `from`; `nftables` is such a namespace with a ruleset; `raw` is a program that copies frames both ways through packet sockets."},
		"lab.functions[].ruleset": {" none", "The ruleset, in the format of `nft -f`."},
		"lab.functions[].mtu":     {" `lab.mtu`", "MTU of the function's links."},
	}
}
