// Command waystamp is the program of a node and of who plans a domain: the agent,
// and what reads plans and asks agents. The laboratory is the program waystamp-lab.
// This package ties the process to internal/cli and does nothing else.
package main

import (
	"os"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
)

func main() { os.Exit(command.Process(cli.Main)) }
