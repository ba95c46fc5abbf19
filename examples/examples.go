// Package examples holds the example files, for the commands that show
// something without being given a file.
package examples

import _ "embed"

// PaperName is what messages about Paper call it.
const PaperName = "examples/paper.yaml"

// Paper is the network of Fig. 7a of the paper on ordered proof of transit.
//
//go:embed paper.yaml
var Paper []byte
