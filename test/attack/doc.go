// Package attack mounts every attack of internal/attack on a lab by the waystamp
// that is built for it, holds their outcomes, and holds that SECURITY.md says
// the same. It is for tests.
package attack
