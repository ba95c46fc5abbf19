// Package package_test tests the Debian packages: their bytes, and what dpkg does with
// them in a root of its own.
package package_test

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// build makes the packages of what make build has left in bin.
func build(t *testing.T, env ...string) (waystamp, lab string) {
	t.Helper()
	out := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "../../packaging/build.sh", "bin", runtime.GOARCH, out)
	cmd.Env = append(append(os.Environ(), "PACKAGE_COMPRESSION=none", "PACKAGE_VERSION=1.2.3~rc1+4.g5eed", "SOURCE_DATE_EPOCH=1700000000"), env...)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	return one(t, filepath.Join(out, "waystamp_*.deb")), one(t, filepath.Join(out, "waystamp-lab_*.deb"))
}

// one is the only file of a pattern.
func one(t *testing.T, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) != 1 {
		t.Fatalf("%s: %q, %v", pattern, files, err)
	}
	return files[0]
}

func sum(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", sha256.Sum256(b))
}

func run(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	b, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	return string(b), err
}

func mustRun(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := run(t, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

func TestTheSameCommitGivesTheSameBytes(t *testing.T) {
	a, aLab := build(t)
	b, bLab := build(t, "TZ=Asia/Tokyo", "LANG=C")
	if filepath.Base(a) != filepath.Base(b) || sum(t, a) != sum(t, b) || sum(t, aLab) != sum(t, bLab) {
		t.Errorf("%s %s and %s %s differ", a, sum(t, a), b, sum(t, b))
	}
}

// The other architecture's packages are made here too, and have its programs.
func TestAnotherArchitecturesPackage(t *testing.T) {
	arch, triplet, machine := "arm64", "aarch64-linux-gnu", elf.EM_AARCH64
	if runtime.GOARCH == arch {
		arch, triplet, machine = "amd64", "x86_64-linux-gnu", elf.EM_X86_64
	}
	bin, out, root := t.TempDir(), t.TempDir(), t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", bin+"/", "./cmd/...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOARCH="+arch, "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	cmd = exec.CommandContext(t.Context(), "../../packaging/build.sh", bin, arch, out)
	cmd.Env = append(os.Environ(), "PACKAGE_RUN=bin", "PACKAGE_COMPRESSION=none", "PACKAGE_VERSION=1.2.3", "SOURCE_DATE_EPOCH=1700000000")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	for _, name := range []string{"waystamp", "waystamp-lab"} {
		deb := one(t, filepath.Join(out, name+"_*_"+arch+".deb"))
		if got := strings.TrimSpace(mustRun(t, "dpkg-deb", "-f", deb, "Architecture")); got != arch {
			t.Errorf("%s is for %s, want %s", deb, got, arch)
		}
		mustRun(t, "dpkg-deb", "-x", deb, root)
		f, err := elf.Open(filepath.Join(root, "usr/bin", name))
		if err != nil {
			t.Fatal(err)
		}
		if f.Machine != machine {
			t.Errorf("%s is a program of %s", name, f.Machine)
		}
		f.Close()
	}
	if _, err := os.Lstat(filepath.Join(root, "usr/lib", triplet, "wireshark/extcap/waystamp")); err != nil {
		t.Error(err)
	}
}

func TestWhatThePackagesSayOfThemselves(t *testing.T) {
	deb, lab := build(t)
	version := strings.TrimSpace(mustRun(t, "dpkg-deb", "-f", deb, "Version"))
	if out, err := run(t, "dpkg", "--validate-version", version); err != nil {
		t.Errorf("version %q: %s", version, out)
	}
	if got, want := strings.TrimSpace(mustRun(t, "dpkg-deb", "-f", lab, "Depends")), "waystamp (= "+version+")"; !strings.HasPrefix(got, want) {
		t.Errorf("waystamp-lab depends on %q, want %q", got, want)
	}
	root := t.TempDir()
	mustRun(t, "dpkg-deb", "-x", deb, root)
	mustRun(t, "dpkg-deb", "-x", lab, root)
	if out := mustRun(t, filepath.Join(root, "usr/bin/waystamp"), "version"); !strings.HasPrefix(out, "waystamp ") {
		t.Errorf("the packaged program says %q", out)
	}
	// Each command has a page, which man could show.
	for _, command := range []string{"waystamp", "waystamp-agent", "waystamp-plan", "waystamp-lab-up"} {
		gz := filepath.Join(root, "usr/share/man/man1", command+".1.gz")
		if text := mustRun(t, "gzip", "-dc", gz); !strings.Contains(text, ".SH NAME") {
			t.Errorf("%s is no manual page:\n%s", gz, text)
		}
	}
	// What the units call are commands with these flags.
	missing := filepath.Join(root, "no-such-file")
	for unit, c := range map[string]struct{ from, to, says string }{
		"waystamp-agent@.service":     {"/etc/waystamp/r1.json", missing, missing},
		"waystamp-controller.service": {"/run/waystamp/controller/controller.sock", "no-path", "--listen"},
	} {
		b, err := os.ReadFile(filepath.Join(root, "usr/lib/systemd/system", unit))
		if err != nil {
			t.Fatal(err)
		}
		var call string
		variables := map[string]string{}
		for line := range strings.Lines(strings.ReplaceAll(string(b), "%i", "r1")) {
			line = strings.TrimSpace(line)
			if v, ok := strings.CutPrefix(line, "ExecStart="); ok {
				call = v
			}
			if v, ok := strings.CutPrefix(line, `Environment="WAYSTAMP_SOURCE=`); ok {
				variables["WAYSTAMP_SOURCE"], _, _ = strings.Cut(v, `"`)
			}
		}
		call = os.Expand(call, func(name string) string { return variables[name] })
		words := strings.Fields(strings.NewReplacer(c.from, c.to, "/var/lib/waystamp/controller", filepath.Join(root, "data")).Replace(call))
		if len(words) == 0 || words[0] != "/usr/bin/waystamp" {
			t.Fatalf("%s calls %q", unit, words)
		}
		words[0] = filepath.Join(root, words[0])
		out, err := run(t, words[0], words[1:]...)
		if err == nil || !strings.Contains(out, c.says) {
			t.Errorf("%s with %s: %v\n%s", unit, c.to, err, out)
		}
	}
	// The link is relative, so that it leads to the package's own file also in this root.
	if st, err := os.Stat(one(t, filepath.Join(root, "usr/lib/*/wireshark/extcap/waystamp"))); err != nil || !st.Mode().IsRegular() {
		t.Errorf("Wireshark's extcap: %v", err)
	}
}

// dpkg installs, upgrades, removes and purges in a root of its own. Plans and numbers
// stay while a data path is at work.
func TestWhatDpkgDoesWithThePackage(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("the test needs root, as make test does")
	}
	deb, _ := build(t)
	root := t.TempDir()
	for _, dir := range []string{"var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "var/log", "etc"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"var/lib/dpkg/status", "var/lib/dpkg/available"} {
		if err := os.WriteFile(filepath.Join(root, file), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dpkg := func(args ...string) (string, error) {
		return run(t, "dpkg", append([]string{"--root=" + root, "--force-script-chrootless", "--log=" + filepath.Join(root, "var/log/dpkg.log")}, args...)...)
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := dpkg(args...)
		if err != nil {
			t.Fatalf("dpkg %v: %v\n%s", args, err, out)
		}
		return out
	}
	at := func(path string) string { return filepath.Join(root, path) }
	there := func(path string, want bool) {
		t.Helper()
		_, err := os.Stat(at(path))
		if got := err == nil; got != want {
			t.Errorf("%s is there: %t, want %t", path, got, want)
		}
	}
	write := func(path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(at(path)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at(path), []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
	}

	must("-i", deb)
	there("usr/bin/waystamp", true)
	if info, err := os.Stat(at("etc/waystamp")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the directory of plans, which hold keys: %v, %v", info, err)
	}
	const plan, numbers, pins = "etc/waystamp/r1.json", "var/lib/waystamp/r1/counters.json", "sys/fs/bpf/waystamp/r1"
	write(plan)
	write(numbers)
	if err := os.MkdirAll(at(pins), 0o700); err != nil {
		t.Fatal(err)
	}
	must("-i", deb) // an upgrade
	there(plan, true)

	out := must("-r", "waystamp")
	if want := "waystamp agent --detach --yes --instance r1"; !strings.Contains(out, want) {
		t.Errorf("removal does not say how to end the data path that stays:\n%s", out)
	}
	there("usr/bin/waystamp", false)
	there(plan, true)
	there(numbers, true)
	if out, err := dpkg("--purge", "waystamp"); err == nil || !strings.Contains(out, "still at work") {
		t.Errorf("a purge beside a data path at work: %v\n%s", err, out)
	}
	there(plan, true)
	there(numbers, true)
	if err := os.Remove(at(pins)); err != nil {
		t.Fatal(err)
	}
	must("--purge", "waystamp")
	there(plan, false)
	there(numbers, false)
}

// What systemd itself says of the unit: that it can be read, and how much the agent
// could do to the machine (systemd-analyze(1)).
// What Debian's own judge says of packages. Those of make package are compressed, and their programs stripped.
func TestLintianHasNothingToSay(t *testing.T) {
	waystamp, lab := build(t)
	out, err := run(t, "lintian", "--no-cfg", "--allow-root", "--fail-on=error,warning",
		"--suppress-tags=uses-no-compression-for-data-tarball,uses-no-compression-for-control-tarball,unstripped-binary-or-object", waystamp, lab)
	if err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestSystemdAcceptsTheUnit(t *testing.T) {
	root := t.TempDir()
	unit := filepath.Join(root, "waystamp-agent@r1.service")
	b, err := os.ReadFile("../../packaging/waystamp-agent@.service")
	if err != nil {
		t.Fatal(err)
	}
	self, err := filepath.Abs("../../bin/waystamp")
	if err != nil {
		t.Fatal(err)
	}
	// Otherwise systemd ends workers with their agent.
	if !bytes.Contains(b, []byte("\nKillMode=process\n")) {
		t.Error("the agent's unit has systemd end the workers of functions on byte streams, too")
	}
	b = bytes.ReplaceAll(b, []byte("/usr/bin/waystamp"), []byte(self))
	b = bytes.ReplaceAll(b, []byte("man:waystamp-agent(1) "), nil) // installed with the package
	if err := os.WriteFile(unit, b, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, "systemd-analyze", "verify", unit); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	if out, err := run(t, "systemd-analyze", "security", "--offline=yes", "--threshold=56", "--no-pager", unit); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}

	// The controller's has no capability at all.
	controls := filepath.Join(root, "waystamp-controller.service")
	c, err := os.ReadFile("../../packaging/waystamp-controller.service")
	if err != nil {
		t.Fatal(err)
	}
	c = bytes.ReplaceAll(c, []byte("/usr/bin/waystamp"), []byte(self))
	c = bytes.ReplaceAll(c, []byte("man:waystamp-controller(1) "), nil)
	c = bytes.ReplaceAll(c, []byte("=waystamp-controller\n"), []byte("=daemon\n")) // a user that is here
	if err := os.WriteFile(controls, c, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, "systemd-analyze", "verify", controls); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	if out, err := run(t, "systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", controls); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}

	// The same without root.
	mount, err := os.ReadFile("../../packaging/waystamp-bpf.service")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "waystamp-bpf.service"), mount, 0o644); err != nil {
		t.Fatal(err)
	}
	more, err := os.ReadFile("../../packaging/unprivileged.conf")
	if err != nil {
		t.Fatal(err)
	}
	more = bytes.ReplaceAll(more, []byte("/usr/bin/waystamp"), []byte(self))
	more = bytes.ReplaceAll(more, []byte("=waystamp\n"), []byte("=daemon\n")) // a user that is here
	if err := os.WriteFile(unit, append(append(b[:bytes.Index(b, []byte("[Install]"))], more...), b[bytes.Index(b, []byte("[Install]")):]...), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := run(t, "systemd-analyze", "verify", unit); err != nil || strings.TrimSpace(out) != "" {
		t.Errorf("systemd-analyze verify, without root: %v\n%s", err, out)
	}
	if out, err := run(t, "systemd-analyze", "security", "--offline=yes", "--threshold=30", "--no-pager", unit); err != nil {
		t.Errorf("systemd-analyze security, without root: %v\n%s", err, out)
	}
}
