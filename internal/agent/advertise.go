package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
)

// sidRoutes are the routes of SIDs in the kernel's table, each a /64.
type sidRoutes interface {
	// SIDs lists those within a locator: announced by waystamp, and routes of others.
	SIDs(locator netip.Prefix) (announced []netip.Prefix, others []host.Route, err error)
	// AnnounceSID fails with fs.ErrExist where a route of others is in the way.
	AnnounceSID(sid netip.Prefix) error
	WithdrawSID(sid netip.Prefix) error
}

// advertised lists the SIDs that need routes for a plan while these functions are gone, in order
// and each once: the SIDs of the other functions, and the node's egress SIDs.
func advertised(n plan.Node, gone []string) []netip.Prefix {
	if n.Advertise != model.AdvertiseSIDs {
		return nil
	}
	var sids []netip.Prefix
	add := func(sid netip.Addr) { sids = append(sids, netip.PrefixFrom(sid, 64).Masked()) }
	for _, e := range n.Endpoints {
		if !slices.Contains(gone, e.Function) {
			add(e.SID)
		}
	}
	for _, e := range n.Egresses {
		add(e.SID)
	}
	slices.SortFunc(sids, netip.Prefix.Compare)
	return slices.Compact(sids)
}

// setSIDs announces those SIDs of want that are within a locator, and withdraws all
// others there. It returns how many it has changed, and the routes of others to SIDs of
// the locator, which it leaves alone. On an error it has done as much as it could.
func setSIDs(r sidRoutes, locator netip.Prefix, want []netip.Prefix) (announced, withdrawn int, others []host.Route, err error) {
	have, others, err := r.SIDs(locator)
	if err != nil {
		return 0, 0, nil, err
	}
	missing := map[netip.Prefix]bool{}
	for _, sid := range want {
		missing[sid] = locator.Contains(sid.Addr())
	}
	var errs []error
	for _, sid := range have {
		if missing[sid] {
			missing[sid] = false
		} else if err := r.WithdrawSID(sid); err != nil {
			errs = append(errs, err)
		} else {
			withdrawn++
		}
	}
	for _, sid := range want {
		if !missing[sid] {
			continue
		}
		if err := r.AnnounceSID(sid); err == nil {
			announced++
		} else if !errors.Is(err, fs.ErrExist) { // otherwise the route belongs to another program
			errs = append(errs, err)
		}
	}
	return announced, withdrawn, others, errors.Join(errs...)
}

var warnRoutes = warningKind{"a SID has a route that is not waystamp's", "the SID has no route any more that is not waystamp's"}

// advertise brings the routes of SIDs to the plan in force, in all locators that the
// agent may have announced SIDs of.
func (a *agent) advertise() error {
	gone := a.dp.Gone()
	want := advertised(*a.plan, gone)
	planned := map[netip.Prefix]bool{} // includes SIDs of functions that are gone
	for _, sid := range advertised(*a.plan, nil) {
		planned[sid] = true
	}
	if len(planned) == 0 && a.noSIDs {
		return nil
	}
	var announced, withdrawn int
	var warnings []string
	var errs []error
	for _, locator := range a.state.get().Locators {
		more, less, others, err := setSIDs(a.net, locator, want)
		announced, withdrawn, errs = announced+more, withdrawn+less, append(errs, err)
		for _, o := range others {
			if !planned[o.Destination] {
				continue
			}
			warnings = append(warnings, fmt.Sprintf("SID %s has a route that is not waystamp's (protocol %d, metric %d): neighbours may not learn the SID, or keep it while its function is gone; look at it with ip -6 route show %[1]s, and remove it",
				o.Destination, o.Protocol, o.Metric))
		}
	}
	if announced+withdrawn > 0 {
		a.cfg.Log.Info("the routes of SIDs have changed", "announced", announced, "withdrawn", withdrawn, "gone", gone)
	}
	a.warn(warnRoutes, warnings)
	err := errors.Join(errs...)
	a.noSIDs = err == nil && len(planned) == 0
	return err
}
