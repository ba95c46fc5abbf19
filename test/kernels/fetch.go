package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// newestSeries stands for the newest kernel of newestSuite.
const newestSeries = "newest"

// Where Debian has its newest kernels, and the keys that it signs them with.
const (
	newestSuite = "trixie-backports"
	nextSuite   = "trixie" // has kernels of more flavours than Debian 12
	debianKeys  = "/usr/share/keyrings/debian-archive-keyring.gpg"
)

// kernel is an unpacked package.
type kernel struct {
	name    string // as uname -r has it
	version string // of its package
	image   string
	modules string // folder of its modules
}

// apt is a way to packages: this machine's, or one with sources and lists of its own.
type apt struct {
	arch    string // of the packages, as Debian calls it
	options []string
}

// fetchKernel downloads the newest kernel of a series, and unpacks it in dir. Downloads are
// kept in the user's cache; apt compares their checksums each time.
func fetchKernel(ctx context.Context, dir, series string, m machine, deb string) (k kernel, err error) {
	files := strings.Split(deb, ",")
	if deb == "" {
		if files, err = download(ctx, dir, series, m); err != nil {
			return k, err
		}
	}
	root := filepath.Join(dir, "root")
	version := ""
	for i, f := range files {
		v, err := packageVersion(ctx, f, m)
		if err != nil {
			return k, err
		}
		if i == 0 {
			version = v
		}
		if said, err := exec.CommandContext(ctx, "dpkg-deb", "-x", f, root).CombinedOutput(); err != nil {
			return k, fmt.Errorf("unpack %s: %w\n%s", f, err, said)
		}
	}
	k, err = findKernel(root, strings.Join(files, " "))
	k.version = version
	return k, err
}

// packageVersion is the version of a package for a machine's architecture.
func packageVersion(ctx context.Context, file string, m machine) (string, error) {
	if _, err := os.Stat(file); err != nil {
		return "", fmt.Errorf("the kernel's package cannot be read: %w", err)
	}
	said, err := exec.CommandContext(ctx, "dpkg-deb", "-f", file, "Architecture", "Version").Output()
	if err != nil {
		return "", fmt.Errorf("%s is not a Debian package; name a linux-image-*.deb", file)
	}
	field := map[string]string{}
	for line := range strings.Lines(string(said)) {
		name, value, _ := strings.Cut(line, ":")
		field[name] = strings.TrimSpace(value)
	}
	if a := field["Architecture"]; a != m.arch {
		return "", fmt.Errorf("%s is for the architecture %s, and the machine is %s; name a package for it, or say -arch", file, a, m.arch)
	}
	return field["Version"], nil
}

// findKernel finds the one kernel of an unpacked package: in /boot, or from 6.19 on among
// its modules.
func findKernel(root, of string) (k kernel, err error) {
	var images []string
	for _, pattern := range []string{"boot/vmlinuz-*", "lib/modules/*/vmlinuz", "usr/lib/modules/*/vmlinuz"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return k, err
		}
		images = append(images, found...)
	}
	if len(images) != 1 {
		return k, fmt.Errorf("%s: has %d kernels, want one; is it a package linux-image-*?", of, len(images))
	}
	k.image = images[0]
	k.name = strings.TrimPrefix(filepath.Base(k.image), "vmlinuz-")
	if k.name == "vmlinuz" {
		k.name = filepath.Base(filepath.Dir(k.image))
	}
	for _, top := range []string{"lib", "usr/lib"} {
		k.modules = filepath.Join(root, top, "modules", k.name, "kernel")
		if _, err = os.Stat(k.modules); err == nil {
			return k, nil
		}
	}
	return k, fmt.Errorf("%s: has no modules for %s; name the package that has them too, with a comma between (Ubuntu's are in linux-modules-*)", of, k.name)
}

// download gets the packages of the newest kernel of a series.
func download(ctx context.Context, dir, series string, m machine) ([]string, error) {
	a := apt{arch: m.arch}
	var err error
	if series == newestSeries || m.foreign() {
		if a, err = ownLists(ctx, filepath.Join(dir, "apt"), series, m); err != nil {
			return nil, err
		}
	}
	pkg, err := a.newest(ctx, series)
	if err != nil {
		return nil, err
	}
	cache, err := cacheFolder(dir)
	if err != nil {
		return nil, err
	}
	parts, err := a.parts(ctx, pkg)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, p := range parts {
		f, err := a.download(ctx, cache, p)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// cacheFolder is where downloads are kept; dir where the user has no cache.
func cacheFolder(dir string) (string, error) {
	if top, err := os.UserCacheDir(); err == nil {
		dir = filepath.Join(top, "waystamp", "kernels")
	}
	return dir, os.MkdirAll(dir, 0o755)
}

func (a apt) run(ctx context.Context, dir string, args ...string) ([]byte, error) {
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], slices.Concat(a.options, args[1:])...)
	cmd.Dir, cmd.Stderr = dir, &errs
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, errs.Bytes())
	}
	return out, nil
}

// ownLists gives apt sources and lists of its own, in dir: those that this machine's packages come from, and
// where the newest kernels are asked for, or one with pages of another size, newer releases. Packages of
// another architecture come so without dpkg being told of it.
func ownLists(ctx context.Context, dir, series string, m machine) (a apt, err error) {
	out, err := a.run(ctx, "", "apt-get", "indextargets", "--format", "$(ORIGIN) $(RELEASE) $(REPO_URI)", "Identifier: Packages")
	if err != nil {
		return a, err
	}
	var text strings.Builder
	source := func(uri, suite string) {
		fmt.Fprintf(&text, "deb [arch=%s signed-by=%s] %s %s main\n", m.arch, debianKeys, uri, suite)
	}
	from := ""
	seen := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "Debian" || seen[line] {
			continue
		}
		seen[line] = true
		// Of the archive, not of the one for security.
		if from == "" && !strings.Contains(f[1], "-") {
			from = f[2]
		}
		if series != newestSeries {
			source(f[2], f[1])
		}
	}
	if from == "" {
		return a, fmt.Errorf("apt knows no source of Debian, so this kernel cannot be had (apt-get update?); leave Linux %s out with -only", series)
	}
	if series == newestSeries {
		source(from, newestSuite)
	} else if !seen["Debian "+nextSuite+" "+from+"\n"] {
		source(from, nextSuite)
	}
	for _, d := range []string{"lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return a, err
		}
	}
	sources := filepath.Join(dir, "sources.list")
	if err := os.WriteFile(sources, []byte(text.String()), 0o644); err != nil {
		return a, err
	}
	for _, o := range []string{
		"APT::Architecture=" + m.arch, "APT::Architectures::=" + m.arch,
		"Dir::Etc::sourcelist=" + sources, "Dir::Etc::sourceparts=-", "Dir::State::lists=" + filepath.Join(dir, "lists"),
		"Dir::Cache=" + filepath.Join(dir, "cache"), "Dir::State::status=/dev/null", "Acquire::Languages=none",
	} {
		a.options = append(a.options, "-o", o)
	}
	a.arch = m.arch
	_, err = a.run(ctx, "", "apt-get", "-qq", "update")
	return a, err
}

// kernelPackages are the names of a series' packages for an architecture, signed ones: a series may have one
// of Debian's flavours, "cloud" or "rt", which stand before the architecture, or "16k" behind it.
func kernelPackages(series, arch string) (prefix, pattern string) {
	series, flavour, _ := strings.Cut(series, "-")
	prefix, version := "linux-image-"+series+".", regexp.QuoteMeta(series)
	if series == newestSeries {
		prefix, version = "linux-image-", `[0-9]+\.[0-9]+`
	}
	tail := arch
	switch flavour {
	case "":
	case "cloud", "rt":
		tail = flavour + "-" + arch
	default:
		tail = arch + "-" + flavour
	}
	// A version's own part after a dash is a number: 6.1.0-50.
	return prefix, `^linux-image-` + version + `\.[0-9][0-9a-z.+~]*(-[0-9]+)?-` + regexp.QuoteMeta(tail) + `$`
}

// newest asks for the newest kernel of a series.
func (a apt) newest(ctx context.Context, series string) (string, error) {
	prefix, pattern := kernelPackages(series, a.arch)
	out, err := a.run(ctx, "", "apt-cache", "pkgnames", prefix)
	if err != nil {
		return "", err
	}
	name := regexp.MustCompile(pattern)
	newest := ""
	for p := range strings.FieldsSeq(string(out)) {
		if !name.MatchString(p) {
			continue
		}
		if newest == "" || exec.CommandContext(ctx, "dpkg", "--compare-versions", p, "gt", newest).Run() == nil {
			newest = p
		}
	}
	if newest == "" {
		return "", fmt.Errorf("apt knows no package that matches %s (apt-get update?); name a file with -deb", pattern)
	}
	return newest, nil
}

// parts are a kernel's package and those that its files are in besides.
func (a apt) parts(ctx context.Context, pkg string) ([]string, error) {
	out, err := a.run(ctx, "", "apt-cache", "show", pkg)
	if err != nil {
		return nil, err
	}
	parts := []string{pkg}
	for line := range strings.Lines(string(out)) {
		depends, ok := strings.CutPrefix(line, "Depends: ")
		if !ok {
			continue
		}
		for d := range strings.SplitSeq(depends, ",") {
			p, _, _ := strings.Cut(strings.TrimSpace(d), " ")
			if strings.HasPrefix(p, "linux-binary-") || strings.HasPrefix(p, "linux-modules-") {
				parts = append(parts, p)
			}
		}
		break // older versions of the same package follow
	}
	return parts, nil
}

// download gets one package, unless the file is in the cache already, whole.
func (a apt) download(ctx context.Context, cache, pkg string) (string, error) {
	// apt takes a file that is there for whole; so it is asked elsewhere where the file comes from.
	uris, err := a.run(ctx, os.TempDir(), "apt-get", "-qq", "--print-uris", "download", pkg)
	if err != nil {
		return "", err
	}
	// 'URI' FILE SIZE SHA256:HEX
	f := strings.Fields(string(uris))
	sum, ok := "", false
	if len(f) == 4 {
		sum, ok = strings.CutPrefix(f[3], "SHA256:")
	}
	if !ok {
		return "", fmt.Errorf("apt-get --print-uris download %s: got %q, want an address, a file, a size and SHA256", pkg, uris)
	}
	file := filepath.Join(cache, f[1])
	if checkSum(file, sum) == nil {
		return file, nil
	}
	// Also older versions of it.
	old, err := filepath.Glob(filepath.Join(cache, pkg+"_*.deb"))
	if err != nil {
		return "", err
	}
	for _, o := range old {
		if err := os.Remove(o); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	fmt.Printf("kernels: fetching %s\n", f[1])
	if _, err := a.run(ctx, cache, "apt-get", "-qq", "download", pkg); err != nil {
		return "", err
	}
	return file, checkSum(file, sum)
}

// checkSum compares a file with its SHA-256 in hexadecimal.
func checkSum(file, want string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return fmt.Errorf("%s: has SHA-256 %s, want %s", file, got, want)
	}
	return nil
}
