package main

import (
	"os"
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

func TestEveryJSONFieldIsOnThePage(t *testing.T) {
	sources := make([]string, len(jsonSources))
	for i, s := range jsonSources {
		sources[i] = "../../" + s
	}
	page, err := jsonPage(sources)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| `/v1/status` | [Status](#status) |",
		"\n## Status\n",
		"| `interfaces` | list of [Interface](#interface) |",
		"| `packet` | string, hexadecimal | *Optional.* its first bytes",
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q", want)
		}
	}
	schema, err := os.ReadFile("../../internal/api/testdata/schema.golden")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(schema)) {
		path, _, _ := strings.Cut(line, " of ")
		words := strings.Fields(path)
		if len(words) < 3 {
			continue
		}
		field := strings.TrimSuffix(words[1][strings.LastIndexByte(words[1], '.')+1:], "[]")
		if words[0] == "GET" && !strings.Contains(page, "| `"+field+"` |") {
			t.Errorf("the page has no field %s, which the schema has: %s", field, line)
		}
	}
}

func TestATableCellKeepsItsBars(t *testing.T) {
	if got, want := row("a|b", "c"), "| a\\|b | c |\n"; got != want {
		t.Errorf("row is %q; want %q", got, want)
	}
}
