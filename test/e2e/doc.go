// Package e2e holds the tests of the whole: chains in laboratories of network
// namespaces, with the agents that ship, real traffic and somebody who tampers
// with it. It knows nothing that an operator could not: it writes domain files
// and plans, reads counters and events, sends and captures packets. What one
// program does with one packet is tested in internal/dataplane. It has tests
// only; nobody imports it.
package e2e
