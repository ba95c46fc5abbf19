package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// guest is the first process of the machine: it loads the modules of its image,
// runs the step that the kernel's command line names, tells what it says and how it ends on the
// second serial line, and turns the machine off.
func guest() {
	// What goes wrong here can only be told: there is nobody to return it to.
	out, err := reportLine()
	if err != nil {
		out = os.Stdout
	}
	watch, logErr := watchFaults()
	err = errors.Join(err, logErr, runStep(out, watch))
	if watch != nil {
		err = errors.Join(err, watch.finish())
	}
	if err != nil {
		fmt.Fprintf(out, "%sfailed %s\n", mark, strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	out.Close()
	unix.Sync()
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF); err != nil {
		fmt.Println("turn the machine off:", err)
	}
}

// reportLine is the second serial line, as it comes: without carriage returns.
func reportLine() (*os.File, error) {
	if err := mount("devtmpfs", "/dev", ""); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(machines[runtime.GOARCH].report, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open the line to the tester: %w", err)
	}
	term, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("set up the line to the tester: %w", err)
	}
	term.Oflag &^= unix.OPOST
	term.Lflag &^= unix.ECHO | unix.ICANON | unix.ISIG
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, term); err != nil {
		return nil, fmt.Errorf("set up the line to the tester: %w", err)
	}
	return f, nil
}

func mount(kind, at, options string) error {
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(kind, at, kind, 0, options); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount %s at %s: %w", kind, at, err)
	}
	return nil
}

// openFiles is the limit of descriptors of a process that systemd starts. The kernel's own is 4096.
const openFiles = 524288

func runStep(out *os.File, watch *faultWatch) error {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: openFiles, Max: openFiles}); err != nil {
		return fmt.Errorf("set the limit of open files: %w", err)
	}
	if err := os.Setenv("PATH", "/usr/bin:/bin"); err != nil {
		return err
	}
	for _, m := range [][3]string{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/tmp", "mode=1777"}, {"tmpfs", "/run"}, {"tmpfs", "/dev/shm", "mode=1777"},
		{"devpts", "/dev/pts"}, {"bpf", "/sys/fs/bpf"}, {"cgroup2", "/sys/fs/cgroup"},
	} {
		if err := mount(m[0], m[1], m[2]); err != nil {
			return err
		}
	}
	for file, text := range map[string]string{
		"/proc/sys/kernel/printk": "4 4 1 4", "/proc/sys/kernel/hostname": "guest",
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	text, err := os.ReadFile(stepsFile)
	if err != nil {
		return err
	}
	var steps []guestStep
	if err := json.Unmarshal(text, &steps); err != nil {
		return fmt.Errorf("read %s: %w", stepsFile, err)
	}
	name := os.Getenv(stepParameter)
	i := slices.IndexFunc(steps, func(s guestStep) bool { return s.Name == name })
	if i < 0 {
		return fmt.Errorf("the kernel's command line asks for step %q (%s), and the image has none", name, stepParameter)
	}
	s := steps[i]
	if watch != nil {
		watch.during(s.Name)
	}
	fmt.Fprintf(out, "%sstep %s\n", mark, s.Name)
	if s.Shell {
		if err := shell(s); err != nil {
			return err
		}
		fmt.Fprintf(out, "%send 0 0\n", mark)
		return nil
	}
	cmd := exec.Command(s.Args[0], s.Args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = s.Dir, out, out
	cmd.Env = slices.Concat(os.Environ(), []string{"HOME=/root", "TMPDIR=/tmp"}, s.Env)
	begun := time.Now()
	runErr := cmd.Run()
	code := 0
	if e := new(exec.ExitError); errors.As(runErr, &e) {
		code = e.ExitCode()
		if e.Sys().(syscall.WaitStatus).Signaled() {
			code = 128 + int(e.Sys().(syscall.WaitStatus).Signal())
		}
	} else if runErr != nil {
		fmt.Fprintln(out, runErr)
		code = 127
	}
	fmt.Fprintf(out, "%send %d %.1f\n", mark, code, time.Since(begun).Seconds())
	return nil
}

// shell runs a shell on the console until it ends, with the repository's files read-only.
func shell(s guestStep) error {
	if err := unix.Mount(guestTree, guestTree, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", guestTree, err)
	}
	if err := unix.Mount("", guestTree, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("mount %s read-only: %w", guestTree, err)
	}
	tty, err := os.OpenFile(machines[runtime.GOARCH].console, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return fmt.Errorf("open the console: %w", err)
	}
	defer tty.Close()
	fmt.Fprintf(tty, "\n%s\n", s.Text)
	cmd := exec.Command(s.Args[0], s.Args[1:]...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Dir, tty, tty, tty
	cmd.Env = slices.Concat(os.Environ(), []string{"HOME=/root", "TMPDIR=/tmp", "TERM=vt100"}, s.Env)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		return fmt.Errorf("run a shell: %w", err)
	}
	return nil
}

// loadModules loads the modules of the image, which come in their order.
func loadModules() error {
	list, err := os.ReadFile(modulesFile)
	if err != nil {
		return err
	}
	for name := range strings.FieldsSeq(string(list)) {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load module %s: %w", name, err)
		}
	}
	return nil
}
