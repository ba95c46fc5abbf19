// Command pretender is waystamp, but for its workers of functions on byte streams: they pretend. They say that they take no more
// connections, and keep the program that gives them connections; and they do not end with their interface. So would one
// whose process somebody has taken over. Tests install it in the place of waystamp.
package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/cli"
	"github.com/waystamp/waystamp/internal/command"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "worker" && slices.Contains(os.Args, "--stay-fd") {
		if err := pretend(option("--parent-fd"), option("--link-fd")); err != nil {
			fmt.Fprintln(os.Stderr, "pretender:", err)
			os.Exit(1)
		}
	}
	os.Exit(command.Process(cli.Main))
}

// option is a descriptor among the arguments.
func option(name string) int {
	if i := slices.Index(os.Args, name); i > 0 && i+1 < len(os.Args) {
		if fd, err := strconv.Atoi(os.Args[i+1]); err == nil {
			return fd
		}
	}
	return -1
}

// pretend puts others behind the descriptors of a worker: a socket that never has an error behind that of its interface, and
// itself behind that of its parent, so that it gets what the worker gets before that is confined.
func pretend(parent, link int) error {
	never, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	if err := unix.Dup3(never, link, unix.O_CLOEXEC); err != nil {
		return err
	}
	up, err := unix.FcntlInt(uintptr(parent), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if err := unix.Dup3(pair[1], parent, unix.O_CLOEXEC); err != nil {
		return err
	}
	unix.Close(pair[1])
	go func() {
		pass(pair[0], up) // its listeners
		pass(up, pair[0]) // its program, whose link stays open here, and its namespaces
		unix.Close(pair[0])
	}()
	return nil
}

// pass passes one message on, and keeps the descriptors in it.
func pass(from, to int) {
	text, oob := make([]byte, 64<<10), make([]byte, unix.CmsgSpace(16*4))
	n, oobn, _, _, err := unix.Recvmsg(from, text, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		return
	}
	var fds []int
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return
	}
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return
		}
		fds = append(fds, got...)
	}
	if unix.Sendmsg(to, text[:n], unix.UnixRights(fds...), nil, 0) != nil {
		return
	}
}
