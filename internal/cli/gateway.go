package cli

import (
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
)

// NewGatewayCommand has the commands on gateways of services.
func NewGatewayCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "gateway", Short: "Look at what gateways of services decide"}
	cmd.AddCommand(newGatewayExplainCommand())
	return cmd
}

type gatewayExplain struct {
	file, files, cert, service, host, method, path, output string
	headers                                                []string
}

func newGatewayExplainCommand() *cobra.Command {
	var o gatewayExplain
	cmd := &cobra.Command{
		Use:   "explain -f FILE",
		Short: "Say what would be decided about a client and its request, and by which rule",
		Long: `Read the services of a domain file, a client's certificate, and a request that nobody
has sent, and say what the gateway would decide: who the client is or why its certificate
is refused, the rule that lets the request in and its chain, or the reason for which
it is refused, and what of each rule it does not match. The code is that of the
gateway. Nothing is sent.

The files that clients name (ca, crl) are read from the folder of the domain file, or
from --files. The client's key is not asked for. No responder of OCSP is asked whether the
certificate is revoked.

For a service with protocol tls there is no request: rules look at the identity and the host.
For a proxy (mode: connect) --host is what the client asks for, with its port.

Exit code 0 if the request would be let in, 4 if not.`,
		Example: `  waystamp gateway explain -f examples/zerotrust.yaml --cert alice.pem --path /public/a
  waystamp gateway explain -f domain.yaml --cert alice.pem --host shop.example.org --method POST --path /cart -o json`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	cmd.Flags().StringVarP(&o.file, "file", "f", "", "domain `file`; - is standard input")
	cmd.Flags().StringVar(&o.files, "files", "", "`folder` that names of files count from; that of the domain file if not given")
	cmd.Flags().StringVar(&o.cert, "cert", "", "`file` with the client's certificate, and those between it and its root, in PEM; without, the client shows none")
	cmd.Flags().StringVar(&o.host, "host", "", "`name` of the host, with a port or without, or of a proxy's destination; not needed where the services have one host")
	cmd.Flags().StringVar(&o.method, "method", http.MethodGet, "`method` of the request")
	cmd.Flags().StringVar(&o.path, "path", "/", "`path` of the request, with a query or without")
	cmd.Flags().StringArrayVar(&o.headers, "header", nil, "`header` of the request, as in \"X-Version: beta\"; several are possible")
	cmd.Flags().StringVar(&o.service, "service", "", "`name` of the service, where several have the host")
	cmd.Flags().StringVarP(&o.output, "output", "o", "table", "`format` of the result: table or json")
	return cmd
}

func (o *gatewayExplain) run(cmd *cobra.Command) error {
	if o.file == "" {
		return command.Usagef("-f is missing; name the domain's file, as in waystamp gateway explain -f examples/zerotrust.yaml")
	}
	if o.output != "table" && o.output != "json" {
		return command.Usagef("-o %q is not a format; expect table or json", o.output)
	}
	header := http.Header{}
	for _, h := range o.headers {
		name, value, ok := strings.Cut(h, ":")
		if !ok || strings.TrimSpace(name) != name || name == "" {
			return command.Usagef("--header %q is not a header; expect one as in \"X-Version: beta\"", h)
		}
		header.Add(name, strings.TrimSpace(value))
	}
	ctx := cmd.Context()
	m, err := command.ReadManifest(ctx, o.file, cmd.InOrStdin(), cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	s, err := o.find(m.Domain)
	if err != nil {
		return err
	}
	if s.Mode == model.ModeConnect {
		if _, named := s.Destination(strings.ToLower(o.host)); !named && slices.Contains(s.Hosts, o.host) {
			return command.Usagef("service %s is a proxy; --host is what its client asks for, with the port, as in --host %s", s.Name, s.Destinations[0].Name())
		}
	}
	if s.Opaque.On {
		for _, flag := range []string{"method", "path", "header"} {
			if cmd.Flags().Changed(flag) {
				return command.Usagef("service %s has protocol %s, whose bytes the gateway does not read: there is no request to ask about; leave --%s out", s.Name, s.Protocol(), flag)
			}
		}
		o.method, o.path = "", ""
	}
	folder := gateway.Folder(o.files)
	if o.files == "" {
		folder = gateway.Folder(filepath.Dir(o.file))
	}
	view, err := await.Do(ctx, func() (gatewayExplainView, error) { return o.explain(m.Domain, s, header, folder, time.Now()) })
	if err != nil {
		return err
	}
	if o.output == "json" {
		e := json.NewEncoder(cmd.OutOrStdout())
		e.SetIndent("", "  ")
		err = e.Encode(view)
	} else {
		err = view.table(cmd.OutOrStdout())
	}
	if err == nil && view.Reason != "" {
		return &command.ExitError{Code: command.ExitRefused}
	}
	return err
}

// find is the service that a client asks for.
func (o *gatewayExplain) find(d model.Domain) (model.Service, error) {
	if len(d.Services) == 0 {
		return model.Service{}, command.Usagef("%s has no services", o.file)
	}
	var hosts []string
	for _, s := range d.Services {
		if s.Mode == model.ModeConnect {
			for _, d := range s.Destinations {
				hosts = append(hosts, d.Name())
			}
			continue
		}
		hosts = append(hosts, s.Hosts...)
	}
	if o.host == "" && len(hosts) == 1 {
		o.host = hosts[0]
	}
	if o.host == "" {
		return model.Service{}, command.Usagef("--host is missing; expect one of %s", strings.Join(hosts, ", "))
	}
	host, _, _ := strings.Cut(strings.ToLower(o.host), ":")
	var found []model.Service
	var names []string
	for _, s := range d.Services {
		_, destination := s.Destination(strings.ToLower(o.host))
		if (destination || slices.Contains(s.Hosts, host) || s.Mode == model.ModeConnect && o.service == s.Name) && (o.service == "" || o.service == s.Name) {
			found, names = append(found, s), append(names, s.Name)
		}
	}
	switch {
	case len(found) == 0 && o.service != "":
		return model.Service{}, command.Usagef("service %s has no host %s, or is not there; the services have %s", o.service, host, strings.Join(hosts, ", "))
	case len(found) == 0:
		return model.Service{}, command.Usagef("no service has host %s, so that its gateway refuses the connection (%s); the services have %s", host, gateway.SNIUnknown, strings.Join(hosts, ", "))
	case len(found) > 1:
		return model.Service{}, command.Usagef("services %s have host %s, at gateways of their own; say which with --service", strings.Join(names, " and "), host)
	}
	return found[0], nil
}

// gatewayExplainView is what -o json prints.
type gatewayExplainView struct {
	Version  int                  `json:"version"`
	Service  string               `json:"service"`
	Node     string               `json:"node"` // of the gateway
	Address  netip.AddrPort       `json:"address"`
	Identity string               `json:"identity,omitempty"` // none: the certificate is refused
	Serial   string               `json:"serial,omitempty"`
	Until    *time.Time           `json:"valid_until,omitempty"`
	Protocol string               `json:"protocol"`         // http or tls
	Method   string               `json:"method,omitempty"` // of HTTP, as Target
	Host     string               `json:"host"`
	Target   string               `json:"target,omitempty"`
	Path     string               `json:"path,omitempty"` // as rules look at it
	Allowed  bool                 `json:"allowed"`
	Rule     int                  `json:"rule,omitempty"` // from 1
	Chain    string               `json:"chain,omitempty"`
	Reason   string               `json:"reason,omitempty"`
	Why      string               `json:"why,omitempty"`
	Rules    []gatewayExplainRule `json:"rules,omitempty"` // those that were looked at

	// Unasked: the gateway asks a responder of OCSP about the certificate, and this command has not.
	Unasked bool     `json:"responder_unasked,omitempty"`
	Readers []string `json:"readers,omitempty"` // that have the request in clear

	functions []string
	egress    string
}

// gatewayExplainRule is what one rule says of the request.
type gatewayExplainRule struct {
	Rule   int    `json:"rule"`
	Chain  string `json:"chain"`
	Misses string `json:"misses,omitempty"` // the part that does not match; none: all do

	who string
}

func (o *gatewayExplain) explain(d model.Domain, s model.Service, header http.Header, folder gateway.Folder, now time.Time) (gatewayExplainView, error) {
	v := gatewayExplainView{Version: 1, Service: s.Name, Node: s.Nodes[0], Address: s.Address, Protocol: s.Protocol(), Method: o.method, Host: o.host, Target: o.path}
	var shown []*x509.Certificate
	if o.cert != "" {
		var err error
		if shown, err = gateway.ReadCertificates(gateway.Folder("."), o.cert); err != nil {
			return v, fmt.Errorf("read the client's certificate: %w", err)
		}
		v.Serial = shown[0].SerialNumber.Text(16)
		v.Until = new(shown[0].NotAfter.UTC())
	}
	i := slices.IndexFunc(d.Clients, func(c model.Clients) bool { return c.Name == s.Clients })
	x, err := gateway.Explain(s, d.Clients[i], folder, gateway.Question{Shown: shown, Host: o.host, Method: o.method, Target: o.path, Header: header}, now)
	if err != nil {
		return v, err
	}
	v.Identity, v.Path, v.Unasked = x.Identity, x.Path, x.Unasked
	for i, misses := range x.Misses {
		v.Rules = append(v.Rules, gatewayExplainRule{Rule: i + 1, Chain: s.Rules[i].Chain, Misses: misses, who: s.Rules[i].Who})
	}
	if x.Refusal != nil {
		v.Reason, v.Why = string(x.Refusal.Reason), x.Refusal.Err.Error()
		return v, nil
	}
	v.Allowed, v.Rule, v.Chain = true, x.Rule+1, s.Rules[x.Rule].Chain
	for _, c := range d.Chains {
		if c.Name == v.Chain {
			v.functions, v.egress, v.Readers = c.Functions, c.Egress, readersOf(d, c, s)
		}
	}
	return v, nil
}

// readersOf are who has payload of a service in clear that goes by a chain.
func readersOf(d model.Domain, c model.Chain, s model.Service) []string {
	if s.Mode == model.ModeConnect {
		return []string{"everybody on the way, as far as the client has not sealed it"}
	}
	out := []string{"the gateway on " + s.Nodes[0]}
	for _, name := range c.Functions {
		if f, _ := d.Function(name); f.Intrusive {
			out = append(out, name+" on "+f.Node)
		}
	}
	return append(out, "the server "+s.Origin.Name)
}

func (v gatewayExplainView) table(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "service   %s, at %s, gateway on %s\n", v.Service, v.Address, v.Node)
	if v.Until == nil {
		b.WriteString("client    shows no certificate\n")
	} else {
		client := v.Identity
		if client == "" {
			client = "not known"
		}
		fmt.Fprintf(&b, "client    %s (certificate %s, valid until %s)\n", client, v.Serial, v.Until.Format(time.RFC3339))
		if v.Unasked {
			b.WriteString("revoked   not asked here: the gateway asks a responder of OCSP as well\n")
		}
	}
	path := v.Path
	if path == "" {
		path = v.Target // nobody looked at it, or it is refused
	}
	what := "THE REQUEST"
	if v.Method == "" {
		what = "THE CONNECTION"
		fmt.Fprintf(&b, "asks for  a connection to %s, whose bytes the gateway does not read\n", v.Host)
	} else {
		fmt.Fprintf(&b, "request   %s %s%s\n", v.Method, v.Host, path)
	}
	if v.Allowed {
		fmt.Fprintf(&b, "decision  let in by rule %d, by chain %s: %s, out at %s\n", v.Rule, v.Chain, strings.Join(v.functions, ", "), v.egress)
		fmt.Fprintf(&b, "read by   %s\n", strings.Join(v.Readers, ", "))
	} else {
		fmt.Fprintf(&b, "decision  refused (%s): %s\n", v.Reason, v.Why)
	}
	if len(v.Rules) > 0 {
		t := planTable{head: []string{">RULE", "WHO", "CHAIN", what}}
		for _, r := range v.Rules {
			says := "matches"
			switch header, is := strings.CutPrefix(r.Misses, "header "); {
			case is:
				says = "lacks header " + header + " of this value, once"
			case r.Misses == "who":
				says = "is of another identity"
			case r.Misses != "":
				says = "has another " + r.Misses
			case r.Rule == v.Rule:
				says = "matches, and the rule decides"
			}
			if v.Rule > 0 && r.Rule > v.Rule {
				says += "; not asked"
			}
			t.add(r.Rule, r.who, r.Chain, says)
		}
		b.WriteByte('\n')
		t.write(&b, "  ")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
