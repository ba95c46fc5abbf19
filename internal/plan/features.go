package plan

import (
	"encoding"
	"slices"

	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// Names of features that are no value of an enumeration.
const (
	featureSeal    = "seal"
	featureGateway = "gateway"
	featureOpaque  = "gateway protocol tls" // services that are not HTTP
	featureOwn     = "gateway mode own"
	featureConnect = "gateway mode connect"
	featureKeys    = "keys of functions"       // for seal and open in a function of kind stream
	featureOCSP    = "gateway ocsp"            // clients whose responders are asked
	featureHeaders = "gateway client-headers"  // services that name headers of their own
	featureSigner  = "gateway signer"          // services whose keys other processes have
	featureParams  = "parameters of functions" // functions of kind stream that are instances for parameters of visits
	featureFilter  = "intrusive netfilter"     // functions of kind netfilter that plain connections go through
	featureEnds    = "seal certificates"       // ends of sealed parts that make their keys themselves
	featureRevoked = "seal revocations"        // ends that refuse certificates of before a revocation
)

// FirstFeatures are those of agents that do not say which they have: they are older than the list. It never
// changes.
var FirstFeatures = []string{
	"kind forward", "kind unaware", "kind netfilter", "kind stream",
	"scheme pot", "scheme opot", "scheme keyed", "scheme keyed-flow",
	"encapsulation srv6", "encapsulation sr-mpls", "sids plain", "sids compressed",
	featureSeal, featureGateway,
}

// Features are what plans may ask of an agent, as this program knows them: kinds of functions, schemes of
// proofs, and encapsulations. Names of a later version may be more.
func Features() []string {
	all := named[model.Kind](nil, "kind ")
	all = named[model.Scheme](all, "scheme ")
	all = named[model.EncapsulationType](all, "encapsulation ")
	all = named[model.SIDs](all, "sids ")
	return append(all, featureSeal, featureGateway, featureOpaque, featureOwn, featureConnect, featureKeys, featureOCSP, featureHeaders, featureSigner, featureFilter, featureParams, featureEnds, featureRevoked)
}

// named adds the names of all values of an enumeration.
func named[T interface {
	~uint8
	encoding.TextMarshaler
}](all []string, what string) []string {
	for v := T(0); ; v++ {
		name, err := v.MarshalText()
		if err != nil {
			return all
		}
		all = append(all, what+string(name))
	}
}

// Features are what the node's plan asks of its agent, sorted.
func (n Node) Features() []string {
	seen := map[string]bool{}
	path := func(id PathID) {
		seen["scheme "+id.Scheme.String()] = true
		seen["encapsulation "+id.Encapsulation.Type.String()] = true
		seen["sids "+id.Encapsulation.SIDs.String()] = true
	}
	proxies := map[string]bool{}
	for _, p := range n.Proxies {
		proxies[p.Function] = true
		switch {
		case p.Gateway != nil:
			seen[featureGateway] = true
			for _, c := range p.Gateway.Clients {
				if c.OCSP {
					seen[featureOCSP] = true
				}
			}
			for _, s := range p.Gateway.Services {
				if s.Signer != "" {
					seen[featureSigner] = true
				}
				if !s.Opaque.On && s.Headers != model.StandardHeaders() {
					seen[featureHeaders] = true
				}
				switch {
				case s.Mode == model.ModeConnect:
					seen[featureConnect] = true
				case s.Opaque.On:
					seen[featureOpaque] = true
				}
				if s.Mode == model.ModeOwn {
					seen[featureOwn] = true
				}
			}
		case p.Stream != nil:
			seen["kind "+model.KindStream.String()] = true
			if p.Netfilter != nil {
				seen[featureFilter] = true
			}
			if i, err := model.ReadInstance(p.Function); err == nil && i.Function != p.Function {
				seen[featureParams] = true
			}
			if files, err := function.KeyFiles(p.Stream.Run, p.Stream.Back); err == nil && len(files) > 0 {
				seen[featureKeys] = true
			}
		case p.Netfilter != nil:
			seen["kind "+model.KindNetfilter.String()] = true
		default:
			seen["kind "+model.KindUnaware.String()] = true
		}
	}
	for _, h := range n.Headends {
		path(h.PathID)
		if h.Seal != nil {
			seen[featureSeal] = true
			seen[featureEnds] = seen[featureEnds] || h.Seal.Certified
			seen[featureRevoked] = seen[featureRevoked] || h.Seal.Revocations+h.Seal.PeerRevocations > 0
		}
	}
	for _, e := range n.Endpoints {
		path(e.PathID)
		if !proxies[e.Function] {
			seen["kind "+model.KindForward.String()] = true
		}
	}
	for _, e := range n.Egresses {
		path(e.PathID)
		if e.Seal != nil {
			seen[featureSeal] = true
			seen[featureEnds] = seen[featureEnds] || e.Seal.Certified
			seen[featureRevoked] = seen[featureRevoked] || e.Seal.Revocations+e.Seal.PeerRevocations > 0
		}
	}
	var out []string
	for name, asked := range seen {
		if asked {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
