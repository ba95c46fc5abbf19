package cli

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/lab"
)

// Prefixes of the names of interfaces that Wireshark shows. The first alone is all agents of this machine.
const (
	extcapAll      = "waystamp"
	extcapInstance = "waystamp-agent-"
	extcapLab      = "waystamp-lab-"
)

// extcapOptions are the arguments of Wireshark's extcap interface, as in its man page extcap(4).
type extcapOptions struct {
	in                          surroundings
	interfaces, dlts, config    bool
	capture                     bool
	name, fifo, version, filter string
	reload                      string
	paths                       string
}

// newExtcapCommand is run by Wireshark and not by a person.
func newExtcapCommand(in surroundings) *cobra.Command {
	o := extcapOptions{in: in}
	cmd := &cobra.Command{
		Use:   "extcap --extcap-interfaces | --extcap-interface NAME --capture --fifo FILE",
		Short: "Give Wireshark refused packets as an interface to capture on",
		Long: `Speak Wireshark's extcap protocol, so that Wireshark and tshark list the agents of this
machine, and its labs, as interfaces. A capture there has the packets that nodes refuse, as with
waystamp watch --pcap: each with the reason as a comment, first those that the agents remember.

Wireshark runs this by a script in its extcap folder (tshark -G folders shows the path). The package
puts it there; the source has it in tools/wireshark.
A user must be allowed to read the agents' sockets, as for waystamp watch.`,
		Example: `  ln -s /usr/share/waystamp/waystamp-extcap /usr/lib/x86_64-linux-gnu/wireshark/extcap/waystamp
  tshark -D
  tshark -i waystamp`,
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	f := cmd.Flags()
	f.BoolVar(&o.interfaces, "extcap-interfaces", false, "list the interfaces")
	f.StringVar(&o.version, "extcap-version", "", "the `version` of Wireshark")
	f.StringVar(&o.name, "extcap-interface", "", "the interface's `name`")
	f.BoolVar(&o.dlts, "extcap-dlts", false, "print the interface's link type")
	f.BoolVar(&o.config, "extcap-config", false, "print the interface's options")
	f.StringVar(&o.reload, "extcap-reload-option", "", "the `option` whose values to print anew; there is none")
	f.StringVar(&o.filter, "extcap-capture-filter", "", "a capture `filter`; only an empty one is possible")
	f.BoolVar(&o.capture, "capture", false, "capture")
	f.StringVar(&o.fifo, "fifo", "", "the named pipe `file` to write packets to")
	f.StringVar(&o.paths, "paths", "", "`file` with the secrets of all paths, to explain with (default of a lab: the lab's)")
	return cmd
}

func (o *extcapOptions) run(cmd *cobra.Command) error {
	out := cmd.OutOrStdout()
	if o.interfaces {
		return o.list(out)
	}
	w := watchOptions{targets: targetFlags{in: o.in}, again: watchAgain, output: "text", paths: o.paths, pcap: o.fifo}
	switch {
	case o.name == "":
		return command.Usagef("Wireshark runs this; to see refused packets, run waystamp watch, and see waystamp extcap --help")
	case o.name == extcapAll:
	case strings.HasPrefix(o.name, extcapLab):
		w.targets.labs = []string{strings.TrimPrefix(o.name, extcapLab)}
	case strings.HasPrefix(o.name, extcapInstance):
		w.targets.instances = []string{strings.TrimPrefix(o.name, extcapInstance)}
	default:
		return command.Usagef("--extcap-interface: there is no %q; expect %s, %sINSTANCE or %sPREFIX", o.name, extcapAll, extcapInstance, extcapLab)
	}
	switch {
	case o.dlts:
		_, err := fmt.Fprintln(out, "dlt {number=1}{name=EN10MB}{display=Ethernet}")
		return err
	case o.config:
		_, err := fmt.Fprintln(out, "arg {number=0}{call=--paths}{display=Paths}{type=fileselect}{mustexist=true}"+
			"{tooltip=A file with the secrets of all paths. With it the comment of each packet says what was bypassed.}")
		return err
	case o.filter != "":
		return command.Usagef("capture filters are not possible here; use a display filter, as in frame.comment contains \"replay\"")
	case !o.capture:
		return command.Usagef("--capture is missing")
	case o.fifo == "":
		return command.Usagef("--fifo is missing")
	}
	// Wireshark ends a capture by closing its end.
	if err := w.run(cmd); !errors.Is(err, unix.EPIPE) {
		return err
	}
	return nil
}

// list prints what there is to capture on.
func (o *extcapOptions) list(out io.Writer) error {
	names := []string{extcapAll, "Refused packets of all waystamp agents"}
	for _, i := range o.in.instances() {
		names = append(names, extcapInstance+i, "Refused packets of waystamp agent "+i)
	}
	labs, err := lab.List(o.in.labs)
	if err != nil {
		return err
	}
	for _, l := range labs {
		names = append(names, extcapLab+l, "Refused packets of waystamp lab "+l)
	}
	if _, err := fmt.Fprintln(out, "extcap {version=1.0}{display=waystamp}"); err != nil {
		return err
	}
	for n := range slices.Chunk(names, 2) {
		if _, err := fmt.Fprintf(out, "interface {value=%s}{display=%s}\n", n[0], n[1]); err != nil {
			return err
		}
	}
	return nil
}
