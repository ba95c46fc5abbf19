package cli

import (
	"strings"
	"testing"
)

// Where flow records go is checked before the agent looks at anything else.
func TestFlowRecordsNeedACollector(t *testing.T) {
	for args, want := range map[string]string{
		"--ipfix collector:4739":                       `--ipfix: "collector:4739" is no address of a collector; expect ADDRESS:PORT`,
		"--ipfix [fd00::9]:4739 --ipfix-every 100ms":   "--ipfix-every: expect 1s to 1h, have 100ms",
		"--ipfix [fd00::9]:4739 --ipfix-every 2h":      "--ipfix-every: expect 1s to 1h, have 2h",
		"--ipfix-enterprise 32473":                     "go with --ipfix",
		"--ipfix-every 10s":                            "go with --ipfix",
		"--ipfix [fd00::9]:4739 --ipfix-enterprise -1": "invalid argument",
	} {
		cmd := NewAgentCommand()
		cmd.SetArgs(append([]string{"--plan", "/nowhere"}, strings.Fields(args)...))
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
