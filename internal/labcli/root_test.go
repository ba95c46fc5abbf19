package labcli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// Every command says what it does, and what its name means in its help.
func TestEveryCommandHasHelp(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Short == "" || strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: Short is %q; want half a line without a full stop", c.CommandPath(), c.Short)
		}
		if !c.Runnable() {
			t.Errorf("%s does nothing", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(NewRootCommand())
}
