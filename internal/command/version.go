package command

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"
)

// version is set by the Makefile: a tag, or what git describe makes of a commit.
var version = "unreleased"

func versionText() string {
	return fmt.Sprintf("waystamp %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary",
		Args:  NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out := cmd.OutOrStdout()
			switch output {
			case "text":
				_, err := io.WriteString(out, versionText())
				return err
			case "json":
				return json.NewEncoder(out).Encode(struct {
					Version  int    `json:"version"` // of this format
					Waystamp string `json:"waystamp"`
					Go       string `json:"go"`
					Platform string `json:"platform"`
				}{1, version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH})
			}
			return Usagef("--output is %q; expect text or json", output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}
