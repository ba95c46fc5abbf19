// Package waystampv1 is the messages of the controller's API, waystamp.v1, generated from
// internal/rpc/proto. It holds no logic; internal/controller serves them, internal/member and
// internal/cli send them.
package waystampv1
