// Command waystamp-lab is the laboratory: demo, lab, attacks and bench. It is not
// meant to be called by this name: waystamp demo, lab and bench hand over to it. This
// package ties the process to internal/labcli and does nothing else.
package main

import (
	"os"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/labcli"
)

func main() { os.Exit(command.Process(labcli.Main)) }
