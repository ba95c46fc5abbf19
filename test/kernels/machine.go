package main

import (
	"runtime"
	"strconv"
	"strings"
)

// machine is what qemu emulates for an architecture, which Debian and Go call by the same name.
type machine struct {
	arch   string
	qemu   []string
	params string // of the kernel
	// console is what the guest calls the first of the serial lines.
	console string
	// The arguments for two serial lines, and what the guest's kernel calls the second one, by which
	// its first process reports. The first one is the console, and the %s a file.
	lines  []string
	report string
}

var machines = map[string]machine{
	"amd64": {
		"amd64",
		// Where they are missing the kernel copies and clears by words: the emulator takes a string of bytes one by one.
		[]string{"qemu-system-x86_64", "-cpu", "max,-erms,-fsrm"},
		"console=ttyS0",
		"/dev/ttyS0",
		[]string{"-serial", "file:%s", "-serial", "stdio"},
		"/dev/ttyS1",
	},
	"arm64": {
		"arm64",
		// Pointers are signed by something cheaper than QARMA: that takes an emulator most of its time.
		[]string{"qemu-system-aarch64", "-M", "virt", "-cpu", "max,pauth-impdef=on"},
		"console=ttyAMA0",
		"/dev/ttyAMA0",
		[]string{"-serial", "file:%s", "-chardev", "stdio,id=report", "-device", "pci-serial,chardev=report"},
		"/dev/ttyS0",
	},
}

// foreign: programs of this machine do not run on it.
func (m machine) foreign() bool { return m.arch != runtime.GOARCH }

// label is how figures and reports call a kernel of it.
func (m machine) label(series string) string {
	if m.arch == "amd64" {
		return series
	}
	return m.arch + "/" + series
}

// memory of a guest, in MiB.
const memory = 4096

// stepParameter is the parameter of the kernel that names the step to run; the kernel gives it to its first process as a
// variable of the environment.
const stepParameter = "waystamp_step"

// command is qemu's, with its arguments, for a machine that runs one step. Where shell is a file, the console is the terminal, and the report
// goes to that file.
func (m machine) command(kernel, image, console, step, shell string) []string {
	args := append([]string{}, m.qemu...)
	args = append(args, "-accel", "tcg", "-m", strconv.Itoa(memory), "-smp", "2", "-kernel", kernel, "-initrd", image, "-append", m.params+" panic=-1 quiet "+stepParameter+"="+step,
		"-nodefaults", "-display", "none", "-monitor", "none", "-no-reboot")
	if shell != "" {
		// Ctrl-C goes to the guest; Ctrl-A x ends the machine.
		return append(args, "-chardev", "stdio,id=console,mux=on,signal=off,logfile="+console, "-serial", "chardev:console", "-mon", "chardev=console", "-serial", "file:"+shell)
	}
	for _, a := range m.lines {
		args = append(args, strings.ReplaceAll(a, "%s", console))
	}
	return args
}
