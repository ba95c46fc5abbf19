package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Where systemd runs the agent as a unit of Type=notify, it is told when the data
// path is armed, what is wrong with the plan in force, and that the loop which keeps
// the data path still goes round (sd_notify(3)). Elsewhere nothing is said.

// say tells systemd. That it cannot be told is worth a line, and harms nothing here.
func (a *agent) say(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		a.cfg.Log.Warn("systemd cannot be told of the agent's state", "err", err)
	}
}

// sayStatus tells what systemctl status shows, if that is news.
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

// watchdog is how often systemd is to be told that the loop goes round; 0: never.
func (a *agent) watchdog() time.Duration {
	limit, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		a.cfg.Log.Warn("the watchdog of systemd is not understood, and will end the agent", "err", err)
	}
	return limit / 2
}
