// Package arch holds the rules of this repository as tests: which package may
// import which, what only one package may do, what every file must say, and
// that documentation and code agree. It has no code of its own and nothing
// calls it but make check. Each failure names the remedy.
package arch
