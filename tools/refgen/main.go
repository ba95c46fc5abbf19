// Command refgen writes the pages of docs/reference that follow from Go code:
// metrics.md from the tables of internal/agent and internal/controller, domain-file.md from the field lists of internal/manifest, commands.md from the
// commands of internal/cli and internal/labcli. It writes no sentence of its own about a field or a
// command; what a page says stands beside the code. `make generate` runs it, and
// abigen, which writes the pages that follow from C.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/waystamp/waystamp/internal/agent"
	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/controller"
	"github.com/waystamp/waystamp/internal/labcli"
	"github.com/waystamp/waystamp/internal/manifest"
)

func main() {
	dir := flag.String("dir", "docs/reference", "folder to write the pages to")
	man := flag.String("man", "", "folder to write manual pages of the commands to, and nothing else; their date is SOURCE_DATE_EPOCH, in seconds")
	flag.Parse()
	err := error(nil)
	if *man != "" {
		err = manPages(*man, os.Getenv("SOURCE_DATE_EPOCH"))
	} else {
		err = run(*dir)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "refgen: %v\n", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	types, err := jsonPage(jsonSources)
	if err != nil {
		return err
	}
	for name, text := range map[string]string{
		"domain-file.md": domainFile(manifest.Sections(), manifest.Fields(), manifest.Descriptions()),
		"commands.md":    commands(command.Whole(cli.NewRootCommand(), labcli.NewRootCommand())),
		"json.md":        types,
		"metrics.md":     metricsPage(agent.Metrics, controller.Metrics),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("write reference page: %w", err)
		}
	}
	return nil
}

// row is a line of a table.
func row(cells ...string) string {
	for i, c := range cells {
		cells[i] = strings.ReplaceAll(c, "|", `\|`)
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// anchor is what a page calls a heading: lower case, hyphens for spaces, no punctuation.
func anchor(heading string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z':
			return r
		}
		return -1
	}, strings.ToLower(heading))
}
