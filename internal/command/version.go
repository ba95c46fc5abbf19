package command

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/dataplane/object"
)

// version is set by the Makefile: a tag, or what git describe makes of a commit.
var version = "unreleased"

func versionText() string {
	return fmt.Sprintf("waystamp %s (%s, %s/%s)\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// taggedProgram is one of the eBPF programs in this binary.
type taggedProgram struct {
	Name string      `json:"name"`
	Tag  *object.Tag `json:"tag"` // null: each kernel has another
}

func taggedPrograms() (all []taggedProgram, err error) {
	for _, o := range slices.Concat(object.All, object.Alone) {
		tag, err := o.Tag()
		if err != nil {
			return nil, err
		}
		all = append(all, taggedProgram{o.Program, tag})
	}
	return all, nil
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of this binary and of its eBPF programs",
		Long: `Print the version of this binary, of Go, and the tags of its eBPF programs: the
kernel prints the same (bpftool prog show) of those that an agent has loaded. Two
versions with equal tags have the same programs. Linux computes tags by SHA-256
from 6.18 on, by SHA-1 before. Programs that are relocated for the kernel that loads
them have a tag of each kernel's own.`,
		Example: `  waystamp version
  waystamp version -o json | jq '.programs[] | select(.name == "ws_edge_tc").tag.sha256'`,
		Args: NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return Usagef("--output is %q; expect text or json", output)
			}
			programs, err := taggedPrograms()
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if output == "json" {
				return json.NewEncoder(out).Encode(struct {
					Version  int             `json:"version"` // of this format
					Waystamp string          `json:"waystamp"`
					Go       string          `json:"go"`
					Platform string          `json:"platform"`
					Programs []taggedProgram `json:"programs"`
				}{1, version, runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH, programs})
			}
			if _, err := io.WriteString(out, versionText()); err != nil {
				return err
			}
			table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(table, "PROGRAM\tTAG\tTAG BEFORE LINUX 6.18")
			for _, p := range programs {
				tag := object.Tag{SHA256: "each kernel's own", SHA1: "each kernel's own"}
				if p.Tag != nil {
					tag = *p.Tag
				}
				fmt.Fprintf(table, "%s\t%s\t%s\n", p.Name, tag.SHA256, tag.SHA1)
			}
			return table.Flush()
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}
