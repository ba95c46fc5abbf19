package agent

import (
	"github.com/waystamp/waystamp/internal/api"
	"github.com/waystamp/waystamp/internal/dataplane"
)

// wireEach converts a list; one without entries stays a list.
func wireEach[From, To any](list []From, convert func(From) To) []To {
	out := make([]To, len(list))
	for i, v := range list {
		out[i] = convert(v)
	}
	return out
}

func wireCounters(node string, c dataplane.Counts) api.Counters {
	return api.Counters{
		Version: api.Version, Node: node,
		Refusals:  wireEach(c.Refusals, wireRefusal),
		Paths:     wireEach(c.Paths, wirePath),
		Functions: wireEach(c.Functions, wireFunction),
		Errors: api.Errors{
			TooBig: c.Errors.TooBig, TimeExceeded: c.Errors.TimeExceeded, Parameter: c.Errors.Parameter,
			Unreachable: c.Errors.Unreachable, Suppressed: c.Errors.Suppressed, Unanswerable: c.Errors.Unanswerable,
		},
	}
}

func wireRefusal(r dataplane.RefusalCount) api.Refusal {
	return api.Refusal{Reason: r.Reason.String(), Text: r.Text, Dropped: r.Dropped, Reported: r.Reported}
}

func wirePath(p dataplane.PathCount) api.Path {
	return api.Path{
		Role: string(p.Role), Chain: p.Chain, Direction: p.Direction.String(), From: p.From, To: p.To, Path: p.Path, Function: p.Function, SID: p.SID,
		Packets: p.Packets, Frames: p.Frames, Bytes: p.Bytes,
	}
}

func wireFunction(f dataplane.FunctionCount) api.Function {
	return api.Function{
		Function: f.Function, Local: f.Local, Recognise: f.Recognise.String(), Cache: f.Cache,
		RxSuccess: f.RxSuccess, RxIgnored: f.RxIgnored, RxCut: f.RxCut, RxCopies: f.RxCopies,
		TxSuccess: f.TxSuccess, TxIgnored: f.TxIgnored, TxNotCached: f.TxNotCached, TxPlain: f.TxPlain, TxOriginated: f.TxOriginated, Bypassed: f.Bypassed, TxCut: f.TxCut,
		Expired: f.Expired, Evicted: f.Evicted, WaitedNs: f.WaitedNs, InFlight: f.InFlight,
	}
}

func wireInterface(i dataplane.InterfaceState) api.Interface {
	return api.Interface{
		Name: i.Name, Role: i.Role.String(), Datapath: i.Datapath.String(), Unmatched: i.Unmatched,
		TC: i.TC, XDP: i.XDP, Out: i.Out, Clsact: i.Clsact, Functions: i.Functions,
	}
}
