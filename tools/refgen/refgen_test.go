package main

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/labcli"
	"github.com/waystamp/waystamp/internal/manifest"
)

func TestEveryFieldIsOnThePageOnce(t *testing.T) {
	fields := manifest.Fields()
	page := domainFile(manifest.Sections(), fields, manifest.Descriptions())
	if n := strings.Count(page, "\n| `"); n != len(fields) {
		t.Errorf("the page has %d rows of fields, the reader %d fields", n, len(fields))
	}
	for _, want := range []string{
		"| `role` | edge or core | **required** | `edge` leads outside",
		"| `cpus` | whole number from 1 to 4096 | `64` | How many CPUs",
		"| `ingress` | list; each a name of a node | **required** |",
		"| `attach` | the word local, or a [mapping](#functions-attach) | none |",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no row that starts %q", want)
		}
	}
}

func TestEveryCommandIsOnThePage(t *testing.T) {
	page := commands(command.Whole(cli.NewRootCommand(), labcli.NewRootCommand()))
	for _, want := range []string{"## waystamp plan\n", "## waystamp get refusals\n", "| `-f`, `--file file` |"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page of commands has no %q", want)
		}
	}
	if strings.Contains(page, "## waystamp completion") || strings.Contains(page, "`--help`, ") || strings.Contains(page, "| `--help`") {
		t.Error("the page has what cobra adds by itself")
	}
}

func TestATableCellKeepsItsBars(t *testing.T) {
	if got, want := row("a|b", "c"), "| a\\|b | c |\n"; got != want {
		t.Errorf("row is %q; want %q", got, want)
	}
}
