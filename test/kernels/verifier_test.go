package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

func TestVerifierFiguresAreCompared(t *testing.T) {
	before := verifierFigures{{"6.1", "a/x=0"}: {1000, 100, 64}, {"6.1", "b/x=0"}: {1000, 100, 64}, {"6.12", "a/x=0"}: {1, 1, 1}}
	for name, c := range map[string]struct {
		lines []string
		ok    bool
		want  string
	}{
		"as before":        {[]string{"a/x=0 1000 instructions, 100 states, 64", "b/x=0 900 instructions, 90 states, 64"}, true, "900"},
		"a tenth more":     {[]string{"a/x=0 1100 instructions, 110 states, 64", "b/x=0 1000 instructions, 100 states, 64"}, true, "1100"},
		"more than that":   {[]string{"a/x=0 1101 instructions, 100 states, 64", "b/x=0 1000 instructions, 100 states, 64"}, false, "a/x=0 takes the verifier 1101"},
		"more states":      {[]string{"a/x=0 1000 instructions, 111 states, 64", "b/x=0 1000 instructions, 100 states, 64"}, false, "111 states"},
		"one is new":       {[]string{"a/x=0 1000 instructions, 100 states, 64", "b/x=0 1 instructions, 1 states, 1", "c/x=0 1 instructions, 1 states, 1"}, false, "c/x=0 is not in the committed figures"},
		"one was left out": {[]string{"a/x=0 1000 instructions, 100 states, 64"}, false, "b/x=0 is in the committed figures and was not loaded"},
	} {
		said := "@step a\n"
		for _, l := range c.lines {
			said += "verifier: " + l + " bytes of stack\n"
		}
		_, _, r := judge(t, said+"--- PASS: TestX (0.10s)\n@end 0 1\n@step b\n@end 0 1\n", "")
		if len(r.problem) > 0 {
			t.Fatalf("%s: %v", name, r.problem)
		}
		var w strings.Builder
		if ok := r.verifier.compare(&w, before, "6.1", false); ok != c.ok || !strings.Contains(w.String(), c.want) {
			t.Errorf("%s: %v; want %v and %q in\n%s", name, ok, c.ok, c.want, w.String())
		}
		if ok := r.verifier.compare(io.Discard, verifierFigures{}, "6.1", true); !ok {
			t.Errorf("%s: refused on a kernel that has no figures of before", name)
		}
	}
}

func TestVerifierFiguresAreReadAsWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "golden")
	want := verifierFigures{{"6.1", "a/x=0"}: {1000, 100, 64}, {"newest", "b"}: {1, 2, 3}}
	if err := want.write(file); err != nil {
		t.Fatal(err)
	}
	if got, err := readVerifier(file); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if err := os.WriteFile(file, []byte("# what\n6.1 a 7\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := readVerifier(file); err == nil || !strings.HasPrefix(err.Error(), file+":2: expect KERNEL") {
		t.Errorf("got %v", err)
	}
}

func TestOneKernelIsFoundInAPackage(t *testing.T) {
	for name, c := range map[string]struct {
		files []string
		want  string
		err   string
	}{
		"Debian 12":        {[]string{"boot/vmlinuz-6.1.0-1-amd64", "lib/modules/6.1.0-1-amd64/kernel/a.ko"}, "6.1.0-1-amd64", ""},
		"several packages": {[]string{"usr/lib/modules/7.2.1-amd64/vmlinuz", "usr/lib/modules/7.2.1-amd64/kernel/a.ko"}, "7.2.1-amd64", ""},
		"none":             {[]string{"usr/bin/true"}, "", "has 0 kernels, want one"},
		"no modules":       {[]string{"boot/vmlinuz-6.1"}, "", "has no modules for 6.1"},
	} {
		root := t.TempDir()
		for _, f := range c.files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, f), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		k, err := findKernel(root, "x.deb")
		if k.name != c.want && c.err == "" || !strings.Contains(fmt.Sprint(err), c.err) {
			t.Errorf("%s: %+v, %v, want %q %q", name, k, err, c.want, c.err)
		}
	}
}

func TestKernelsAreFoundByTheirSeries(t *testing.T) {
	all := []string{
		"linux-image-6.1.0-50-amd64", "linux-image-6.1.0-50-amd64-unsigned", "linux-image-6.1.0-50-rt-amd64", "linux-image-6.1.0-50-cloud-amd64",
		"linux-image-6.12.107+deb12-amd64", "linux-image-6.12.107+deb12-amd64-dbg", "linux-image-6.12.117+deb13-arm64", "linux-image-6.12.117+deb13-arm64-16k",
		"linux-image-6.12.117+deb13-arm64-16k-unsigned", "linux-image-7.3.4+deb13-amd64", "linux-image-amd64", "linux-image-6.12-amd64",
	}
	for _, c := range []struct{ series, arch, want string }{
		{"6.1", "amd64", "linux-image-6.1.0-50-amd64"},
		{"6.1-cloud", "amd64", "linux-image-6.1.0-50-cloud-amd64"},
		{"6.12", "amd64", "linux-image-6.12.107+deb12-amd64"},
		{"6.12", "arm64", "linux-image-6.12.117+deb13-arm64"},
		{"6.12-16k", "arm64", "linux-image-6.12.117+deb13-arm64-16k"},
		{"newest", "amd64", "linux-image-6.1.0-50-amd64 linux-image-6.12.107+deb12-amd64 linux-image-7.3.4+deb13-amd64"},
		{"5.10", "amd64", ""},
	} {
		prefix, pattern := kernelPackages(c.series, c.arch)
		name := regexp.MustCompile(pattern)
		var got []string
		for _, p := range all {
			if strings.HasPrefix(p, prefix) && name.MatchString(p) {
				got = append(got, p)
			}
		}
		if g := strings.Join(got, " "); g != c.want {
			t.Errorf("%s on %s: %q, want %q", c.series, c.arch, g, c.want)
		}
	}
}

func TestAnotherArchitectureNeedsTheGate(t *testing.T) {
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	for arch, want := range map[string]string{other: "say -gate", "m68k": "-arch m68k is not known; expect one of amd64, arm64"} {
		err := run(t.Context(), options{arch: arch, skips: "skips.golden", verifier: "verifier.golden"})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", arch, err, want)
		}
	}
}
