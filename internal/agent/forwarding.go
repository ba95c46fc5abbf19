package agent

import "github.com/waystamp/waystamp/internal/doctor"

// warningKind has the log messages of warnings that come and go together.
type warningKind struct{ fresh, gone string }

var (
	warnSettings = warningKind{"node settings block packets", "node settings no longer block packets"}
	warnGuard    = warningKind{"the guard does not refuse packets without a proof", "the guard refuses packets without a proof again"}
	warnDown     = warningKind{"an interface is down", "an interface is up again, or no longer in the plan"}
	warnClock    = warningKind{"the clock is wrong", "the clock is right again"}
	warnSilence  = warningKind{"a function returns no packets", "the function returns packets again"}
)

// lookAtForwarding shows problems of the node's settings, once.
func (a *agent) lookAtForwarding() {
	if a.plan == nil {
		return
	}
	a.warn(warnGuard, a.plan.Unenforced())
	a.warn(warnSettings, doctor.Wrong(doctor.Settings(a.net, *a.plan)))
	a.warn(warnDown, doctor.Wrong(doctor.Down(a.net, *a.plan)))
	if a.cfg.ClockOff != nil {
		if off, known := a.cfg.ClockOff(); known {
			f := doctor.ControllerClock(off, a.clockWrong)
			a.clockWrong = f.Verdict == doctor.No
			a.warn(warnClock, doctor.Wrong([]doctor.Finding{f}))
		}
	}
}

// warn shows the warnings of a kind, and logs those that are new or gone.
func (a *agent) warn(kind warningKind, warnings []string) {
	fresh, gone := a.status.warned(kind.fresh, warnings)
	for _, w := range fresh {
		a.cfg.Log.Warn(kind.fresh, "warning", w)
	}
	for _, w := range gone {
		a.cfg.Log.Info(kind.gone, "warning", w)
	}
}
