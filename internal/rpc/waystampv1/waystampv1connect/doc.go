// Package waystampv1connect is the services of the controller's API, waystamp.v1, as Connect has
// them, generated from internal/rpc/proto. It holds no logic; internal/controller serves them,
// internal/member and internal/cli call them.
package waystampv1connect
