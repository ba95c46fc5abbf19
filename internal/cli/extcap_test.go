package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/command"
)

// What Wireshark would not ask, people do.
func TestExtcapRefusesWhatItCannotDo(t *testing.T) {
	for args, says := range map[string]string{
		"":                        "Wireshark runs this; to see refused packets, run waystamp watch",
		"--extcap-interface eth0": `there is no "eth0"; expect waystamp, waystamp-agent-INSTANCE or waystamp-lab-PREFIX`,
		"--extcap-interface waystamp --capture --fifo f --extcap-capture-filter tcp": "capture filters are not possible here",
		"--extcap-interface waystamp":           "--capture is missing",
		"--extcap-interface waystamp --capture": "--fifo is missing",
	} {
		var out, errs bytes.Buffer
		code := command.Run(t.Context(), NewRootCommand(), append([]string{"extcap"}, strings.Fields(args)...), nil, &out, &errs)
		if code != command.ExitUsage || !strings.Contains(errs.String(), says) || out.Len() > 0 {
			t.Errorf("extcap %s: exit %d, %q, %q; want %q", args, code, out.String(), errs.String(), says)
		}
	}
}

// What Wireshark asks of each interface before a capture.
func TestExtcapAnswersWireshark(t *testing.T) {
	for _, name := range []string{"waystamp", "waystamp-agent-r1", "waystamp-lab-x"} {
		for args, says := range map[string]string{
			"--extcap-dlts":   "dlt {number=1}{name=EN10MB}{display=Ethernet}\n",
			"--extcap-config": "arg {number=0}{call=--paths}{display=Paths}{type=fileselect}{mustexist=true}",
		} {
			var out, errs bytes.Buffer
			code := command.Run(t.Context(), NewRootCommand(), []string{"extcap", "--extcap-interface", name, args}, nil, &out, &errs)
			if code != 0 || !strings.HasPrefix(out.String(), says) || errs.Len() > 0 {
				t.Errorf("%s of %s: exit %d, %q, %q; want %q", args, name, code, out.String(), errs.String(), says)
			}
		}
	}
}
