package cli

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway/worker"
	"github.com/waystamp/waystamp/internal/stream"
	"github.com/waystamp/waystamp/internal/stream/sandbox"
)

// newWorkerCommand is "waystamp worker". It is hidden: whoever makes a worker's place
// starts it, with the configuration on its standard input and the memory for its
// statistics behind a descriptor.
func newWorkerCommand() *cobra.Command {
	var statistics, parent, held, stay, link int
	var through []int
	var user uint32
	cmd := &cobra.Command{
		Use:    "worker --statistics-fd FD",
		Short:  "Run the functions of kind stream: the process that terminates their connections",
		Hidden: true,
		Long: `Accept TCP connections at a port, open others to their original destinations from
the clients' own addresses and ports, and move the bytes between them through the
functions that the configuration lists. It has to run in a network namespace in which
every address is local on the way in; elsewhere it gets connections to the machine
alone. The configuration is JSON, on standard input:

  {"name": "zip", "port": 8080, "loops": 2,
   "run": ["count", {"xor": {"passes": 2}}],
   "limits": {"connections": 100000, "buffer": 1048576, "idle": "2h", "half-closed": "10m"}}

With "hold", which names the MAC addresses of both ends of the interface ("node" and
"worker"), a client is answered when its server has answered.

"run" is the list towards the server, "back" towards the client; without "back" it is
"run" in reverse, with each function's inverse.

Before it accepts the first connection, the process gives up its user, its capabilities,
the file system, and all system calls that it does not need.`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if statistics < 3 {
				return command.Usagef("--statistics-fd is %d; pass the memory for statistics as descriptor 3 or above", statistics)
			}
			given := func(fd int, name string) *os.File {
				if fd == 0 {
					return nil
				}
				return os.NewFile(uintptr(fd), name)
			}
			var files []*os.File
			for _, fd := range through {
				files = append(files, given(fd, "through"))
			}
			return stream.Serve(cmd.Context(), cmd.InOrStdin(), given(statistics, "statistics"), given(parent, "parent"), given(held, "held"), given(stay, "stay"), given(link, "link"), user, files...)
		},
	}
	cmd.Flags().IntVar(&statistics, "statistics-fd", 0, "descriptor of the memory that statistics are written to")
	cmd.Flags().IntVar(&parent, "parent-fd", 0, "descriptor of a socket that listeners are sent to, and whose end is the worker's (0: none)")
	cmd.Flags().IntVar(&held, "held-fd", 0, "descriptor of the socket that SYNs wait at (0: clients are answered at once)")
	cmd.Flags().IntSliceVar(&through, "through-fd", nil, "descriptors of listeners behind a function that sealed connections go through in plain (none: there is no such function)")
	cmd.Flags().IntVar(&stay, "stay-fd", 0, "descriptor of a socket with a name: the worker outlives its parent, and the next one finds it there (0: it does not)")
	cmd.Flags().IntVar(&link, "link-fd", 0, "descriptor of a packet socket at the interface whose end is the worker's, with --stay-fd")
	cmd.AddCommand(newGatewayWorkerCommand())
	cmd.Flags().Uint32Var(&user, "user", sandbox.Nobody, "number of the `user`, and group, that a worker started by root becomes")
	return cmd
}

// newGatewayWorkerCommand is "waystamp worker gateway". The agent starts it.
func newGatewayWorkerCommand() *cobra.Command {
	var parent, audit int
	var listeners []int
	var user uint32
	cmd := &cobra.Command{
		Use:    "gateway --parent-fd FD --audit-fd FD --listener-fd FD...",
		Short:  "Run a gateway: the process that terminates its clients' connections",
		Hidden: true,
		Long: `End clients' mutual TLS, decide about their requests, and pass them on by the chains that the
services' rules name. The configuration, with the content of all files, comes by the parent's socket, which is
also asked for each connection onward.

Before anything is read from there, the process gives up its user, its capabilities, the file
system, and all system calls that it does not need.`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if parent < 3 || audit < 3 || len(listeners) == 0 {
				return command.Usagef("pass the socket to the parent, the audit log and the listeners as descriptors 3 and above")
			}
			var files []*os.File
			for _, fd := range listeners {
				files = append(files, os.NewFile(uintptr(fd), "listener"))
			}
			return worker.Serve(cmd.Context(), os.NewFile(uintptr(parent), "parent"), os.NewFile(uintptr(audit), "audit log"), files, cmd.ErrOrStderr(), user)
		},
	}
	cmd.Flags().IntVar(&parent, "parent-fd", 0, "descriptor of the socket to the parent")
	cmd.Flags().IntVar(&audit, "audit-fd", 0, "descriptor of the audit log")
	cmd.Flags().IntSliceVar(&listeners, "listener-fd", nil, "descriptor of a listener")
	cmd.Flags().Uint32Var(&user, "user", sandbox.Nobody, "number of the `user`, and group, that a worker started by root becomes")
	return cmd
}
