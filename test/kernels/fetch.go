package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// kernel is an unpacked package.
type kernel struct {
	name    string // as uname -r has it
	image   string
	modules string // folder of its modules
}

// fetchKernel downloads the newest kernel of a series that apt knows, and unpacks it.
func fetchKernel(ctx context.Context, dir, series, deb string) (k kernel, err error) {
	if deb == "" {
		pkg, err := newestPackage(ctx, series)
		if err != nil {
			return k, err
		}
		cmd := exec.CommandContext(ctx, "apt-get", "-qq", "download", pkg)
		cmd.Dir = dir
		if said, err := cmd.CombinedOutput(); err != nil {
			return k, fmt.Errorf("apt-get download %s: %w\n%s", pkg, err, said)
		}
		files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
		if err != nil || len(files) != 1 {
			return k, fmt.Errorf("apt-get download %s: got %v, want one package", pkg, files)
		}
		deb = files[0]
	}
	root := filepath.Join(dir, "root")
	if said, err := exec.CommandContext(ctx, "dpkg-deb", "-x", deb, root).CombinedOutput(); err != nil {
		return k, fmt.Errorf("unpack %s: %w\n%s", deb, err, said)
	}
	images, err := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return k, fmt.Errorf("%s has the kernels %v, want one", deb, images)
	}
	k.image = images[0]
	k.name = strings.TrimPrefix(filepath.Base(k.image), "vmlinuz-")
	for _, top := range []string{"lib", "usr/lib"} {
		k.modules = filepath.Join(root, top, "modules", k.name)
		if _, err = os.Stat(k.modules); err == nil {
			return k, nil
		}
	}
	return k, fmt.Errorf("%s has no modules: %w", deb, err)
}

// newestPackage asks apt for a series' kernels: those for this architecture, signed
// or not, without "cloud" and "rt" in their names.
func newestPackage(ctx context.Context, series string) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-"+series).Output()
	if err != nil {
		return "", fmt.Errorf("ask apt-cache for kernels: %w", err)
	}
	name := regexp.MustCompile(`^linux-image-` + regexp.QuoteMeta(series) + `\.[0-9][0-9a-z.+~-]*-amd64$`)
	newest := ""
	for p := range strings.FieldsSeq(string(out)) {
		if !name.MatchString(p) || strings.Contains(p, "-rt-") || strings.Contains(p, "-cloud-") {
			continue
		}
		if newest == "" || exec.CommandContext(ctx, "dpkg", "--compare-versions", p, "gt", newest).Run() == nil {
			newest = p
		}
	}
	if newest == "" {
		return "", fmt.Errorf("apt knows no package linux-image-%s.*-amd64; Debian 12 has it (apt-get update?), or name a file with -deb", series)
	}
	return newest, nil
}
