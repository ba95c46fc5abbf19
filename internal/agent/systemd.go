package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// In a unit of Type=notify the agent reports to systemd that the data path is armed, the
// problems of the plan in force, and that its loop runs (sd_notify(3)). Without NOTIFY_SOCKET
// these functions do nothing.

// say sends one state to systemd. A failure is logged and changes nothing else.
func (a *agent) say(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		a.cfg.Log.Warn("the agent's state could not be reported to systemd", "err", err)
	}
}

// sayStatus sends the line that systemctl status shows, if it has changed.
func (a *agent) sayStatus() {
	now := a.status.get()
	wrong := slices.Clone(now.Problems)
	if now.Error != "" {
		wrong = append(wrong, now.Error)
	}
	s := fmt.Sprintf("the plan of node %s is in force", now.Node)
	if len(wrong) > 0 {
		s += "; " + strings.Join(wrong, "; ")
	}
	if s == a.said {
		return
	}
	a.said = s
	a.say("STATUS=" + strings.ReplaceAll(s, "\n", " "))
}

// watchdog is the interval of the loop's signs of life; 0: systemd expects none.
func (a *agent) watchdog() time.Duration {
	limit, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		a.cfg.Log.Warn("the watchdog of systemd is not understood, and will end the agent", "err", err)
	}
	return limit / 2
}
