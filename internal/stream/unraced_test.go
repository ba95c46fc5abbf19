//go:build !race

package stream

const raced = false
