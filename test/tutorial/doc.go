// Package tutorial runs docs/tutorial.md: its blocks of commands in their order, in one
// shell, as root, on the real kernel, and compares what they write with the output
// that the page shows. It has tests only.
package tutorial
