package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/await"
)

// pretended is a machine that a script pretends to be.
func pretended(t *testing.T, script string) (m machine, dir string) {
	t.Helper()
	dir = t.TempDir()
	file := filepath.Join(dir, "qemu")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return machine{arch: "amd64", qemu: []string{file}}, dir
}

// Ctrl-C, and the SIGTERM of whoever gives up, end the context.
func TestInterruptedMachineEnds(t *testing.T) {
	m, dir := pretended(t, `echo $$ >"$(dirname "$0")"/pid.new; mv "$(dirname "$0")"/pid.new "$(dirname "$0")"/pid; exec sleep 1000`)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	done := make(chan error, 1)
	go func() {
		done <- boot(ctx, m, "kernel", "image", filepath.Join(dir, "console"), "a", newReport(io.Discard, "6.1", []step{{name: "a"}}, nil, false))
	}()
	var pid int
	for limit := time.Now().Add(await.Limit(time.Minute)); pid == 0; time.Sleep(time.Millisecond) {
		text, _ := os.ReadFile(filepath.Join(dir, "pid"))
		pid, _ = strconv.Atoi(strings.TrimSpace(string(text)))
		if time.Now().After(limit) {
			t.Fatal("the machine did not start")
		}
	}
	interrupt()
	if err := <-done; err == nil || err.Error() != "interrupted" {
		t.Errorf("got %v", err)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the machine, process %d, is still there: %v", pid, err)
	}
}

func TestMachineThatEndsEarlyShowsItsConsole(t *testing.T) {
	m, dir := pretended(t, "exit 0")
	console := filepath.Join(dir, "console")
	if err := os.WriteFile(console, []byte("Kernel panic - not syncing: no init\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	err := boot(t.Context(), m, "kernel", "image", console, "a", newReport(io.Discard, "6.1", []step{{name: "a"}}, nil, false))
	if err == nil || !strings.Contains(err.Error(), "ended before its tests") || !strings.Contains(err.Error(), "no init") {
		t.Errorf("got %v", err)
	}
}

const (
	breakpointSaid = "[    0.1] x\n[ 1304.8] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\n[ 1304.9] Kernel panic - not syncing: Fatal exception in interrupt\n"
	panicSaid      = "[ 1304.8] BUG: kernel NULL pointer dereference, address: 0\n[ 1304.9] Kernel panic - not syncing: Fatal exception in interrupt\n"
)

// What the emulator does to a machine costs the step that ran, which runs again; any other end is the step's.
func TestStepRunsAgainWhereTheEmulatorEndedIt(t *testing.T) {
	type boot struct{ guest, console, err string }
	whole := boot{guest: "@step a\n--- PASS: TestX (0.10s)\n@end 0 1\n"}
	for name, c := range map[string]struct {
		boots  []boot
		passed int
		want   string // of the error
	}{
		"at once":                  {[]boot{whole}, 1, ""},
		"a breakpoint":             {[]boot{{"@step a\n--- PASS: TestX (0.10s)\n", breakpointSaid, "ended"}, whole}, 1, ""},
		"a breakpoint each time":   {slices.Repeat([]boot{{"@step a\n", breakpointSaid, "ended"}}, bootsMost), 0, "ended"},
		"before its first process": {[]boot{{"", panicSaid, "ended"}, whole}, 1, ""},
		"another panic":            {[]boot{{"@step a\n--- PASS: TestX (0.10s)\n", panicSaid, "ended"}}, 1, "ended"},
		"silence":                  {[]boot{{"@step a\n", "", "said nothing"}}, 0, "said nothing"},
	} {
		console := filepath.Join(t.TempDir(), "console")
		r := newReport(io.Discard, "6.1", []step{{name: "a", pkg: "x"}}, nil, false)
		n := 0
		err := tryStep(func(string) error {
			if n == len(c.boots) {
				t.Fatalf("%s: a boot too many", name)
			}
			b := c.boots[n]
			n++
			readErr := r.read(strings.NewReader(strings.ReplaceAll(b.guest, "@", mark)))
			if err := errors.Join(readErr, os.WriteFile(console, []byte(b.console), 0o644)); err != nil || b.err == "" {
				return err
			}
			return errors.New(b.err)
		}, "a", console, r)
		if (err == nil) != (c.want == "") || err != nil && err.Error() != c.want || r.passed != c.passed || n != len(c.boots) {
			t.Errorf("%s: %d passed after %d boots, %v; want %d after %d, %q", name, r.passed, n, err, c.passed, len(c.boots), c.want)
		}
	}
}

func TestPackagesThatAreNoneAreNamed(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "x.deb")
	if err := os.WriteFile(file, []byte("none"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "p", "DEBIAN"), 0o755); err != nil {
		t.Fatal(err)
	}
	control := "Package: linux-image-6.1\nVersion: 6.1.9-1\nArchitecture: s390x\nMaintainer: x <x@example.org>\nDescription: x\n"
	if err := os.WriteFile(filepath.Join(dir, "p", "DEBIAN", "control"), []byte(control), 0o644); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other.deb")
	if said, err := exec.CommandContext(t.Context(), "dpkg-deb", "--root-owner-group", "-b", filepath.Join(dir, "p"), other).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	for name, c := range map[string]struct{ deb, want string }{
		"no package":             {file, "x.deb is not a Debian package"},
		"no file":                {filepath.Join(dir, "none.deb"), "no such file"},
		"of another":             {other, "is for the architecture s390x, and the machine is amd64"},
		"of nothing but its own": {"", ""},
	} {
		m := machines["amd64"]
		if c.deb == "" {
			m, c.deb = machine{arch: "s390x"}, other
			c.want = "has 0 kernels, want one; is it a package linux-image-*?"
		}
		_, err := fetchKernel(t.Context(), t.TempDir(), "6.1", m, c.deb)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line with %q", name, err, c.want)
		}
	}
}

func TestKernelOfSeveralPackagesIsFound(t *testing.T) {
	dir := t.TempDir()
	pack := func(name, version, file string) string {
		t.Helper()
		top := filepath.Join(dir, name)
		control := fmt.Sprintf("Package: %s\nVersion: %s\nArchitecture: amd64\nMaintainer: x <x@example.org>\nDescription: x\n", name, version)
		for at, text := range map[string]string{"DEBIAN/control": control, file: "x"} {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(top, at)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(top, at), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		deb := top + ".deb"
		if said, err := exec.CommandContext(t.Context(), "dpkg-deb", "--root-owner-group", "-b", top, deb).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, said)
		}
		return deb
	}
	kernel := pack("linux-image-6.8.0-1-generic", "6.8.0-1.1", "boot/vmlinuz-6.8.0-1-generic")
	modules := pack("linux-modules-6.8.0-1-generic", "6.8.0-1.2", "lib/modules/6.8.0-1-generic/kernel/veth.ko")
	k, err := fetchKernel(t.Context(), t.TempDir(), "6.8", machines["amd64"], kernel+","+modules)
	if err != nil || k.name != "6.8.0-1-generic" || k.version != "6.8.0-1.1" {
		t.Errorf("got %+v, %v", k, err)
	}
	_, err = fetchKernel(t.Context(), t.TempDir(), "6.8", machines["amd64"], kernel)
	if want := "has no modules for 6.8.0-1-generic; name the package that has them too"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("without its modules: %v, want %q", err, want)
	}
}

func TestImageMustFitMemory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "image")
	for mib, want := range map[int64]string{1: "", 1500: "", 1600: "the image has 1601 MiB, which a guest of 4096 MiB cannot unpack"} {
		if err := errors.Join(os.WriteFile(file, nil, 0o644), os.Truncate(file, mib<<20)); err != nil {
			t.Fatal(err)
		}
		if err := fitsMemory(file); fmt.Sprint(err) != "<nil>" && want == "" || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d MiB: %v, want %q", mib, err, want)
		}
	}
}
