package main

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra/doc"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/labcli"
)

// manPages writes a page of section 1 for each command, made from its help.
func manPages(dir, epoch string) error {
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH is the date of manual pages, in seconds: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	date := time.Unix(seconds, 0).UTC()
	root := command.Whole(cli.NewRootCommand(), labcli.NewRootCommand())
	root.DisableAutoGenTag = true
	return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Date: &date, Source: "waystamp", Manual: "waystamp"}, dir)
}
