package main

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// modules are those that the tests want, with what they need; where a kernel has
// one built in, it is left out.
var modules = []string{
	"crc32c_generic", "crc32c_cryptoapi", // what libcrc32c asks for by its algorithm
	"veth", "dummy", "tun", "bridge", "8021q", "sch_ingress", "cls_bpf", "act_bpf", "sch_netem", "sch_prio", "act_mirred", "act_vlan", "cls_matchall", "cls_u32",
	"nf_tables", "nfnetlink", "nf_conntrack", "nf_conntrack_ftp", "nf_log_syslog", "nft_ct", "nft_nat", "nft_chain_nat", "nft_masq", "nft_redir", "nft_limit", "nft_log",
	"nft_objref", "nft_synproxy", "nft_reject", "nft_reject_inet", "nft_reject_ipv6", "nft_reject_ipv4", "nft_fib", "nft_fib_inet", "nft_fib_ipv6", "nft_hash", "nft_numgen", "nft_queue", "nfnetlink_queue", "nft_socket", "nft_tproxy", "nft_dup_ipv4", "nft_dup_ipv6", "nft_fwd_netdev", "nft_quota", "nft_flow_offload", "nf_flow_table_inet",
	"vrf", "macvlan", "sch_tbf", "sch_fq", "sch_htb", "mpls_router", "mpls_iptunnel", "tcp_diag", "bonding", "sctp",
}

// Where the guest finds things.
const (
	stepsFile    = "/steps.json"
	modulesFile  = "/modules"
	guestTree    = "/waystamp" // what the repository has that tests read
	guestProgram = "/usr/bin/waystamp"
	guestLab     = "/usr/bin/waystamp-lab"
)

// mark begins the lines by which the guest tells where it is:
//
//	step NAME
//	end CODE SECONDS
//	failed WHY
const mark = "\x1e"

// guestStep is a program to run in the guest.
type guestStep struct {
	Name string
	Args []string
	Dir  string
	Env  []string
	// Shell: Args is one, for somebody at the console, who is shown Text first.
	Shell bool
	Text  string
}

// image is an archive for the kernel to unpack as its first root, with nothing
// in it twice.
type image struct {
	w    *bufio.Writer
	size int64
	has  map[string]bool
	ino  int
}

func newImage(w io.Writer) *image {
	return &image{w: bufio.NewWriterSize(w, 1<<20), has: map[string]bool{"/": true}}
}

// add writes an entry in the format newc of cpio.
func (im *image) add(name string, mode fs.FileMode, data []byte) error {
	name = path.Clean(name)
	if im.has[name] {
		return nil
	}
	if dir := path.Dir(name); !im.has[dir] {
		if err := im.add(dir, fs.ModeDir|0o755, nil); err != nil {
			return err
		}
	}
	im.has[name] = true
	bits := uint32(mode.Perm())
	switch {
	case mode.IsDir():
		bits |= 0o040000
	case mode&fs.ModeSymlink != 0:
		bits |= 0o120000
	default:
		bits |= 0o100000
	}
	return im.entry(strings.TrimPrefix(name, "/"), bits, data)
}

func (im *image) entry(name string, mode uint32, data []byte) error {
	im.ino++
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		im.ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	for _, b := range [][]byte{append([]byte(head), name...), {0}} {
		if err := im.write(b); err != nil {
			return err
		}
	}
	if err := im.pad(); err != nil {
		return err
	}
	if err := im.write(data); err != nil {
		return err
	}
	return im.pad()
}

func (im *image) write(b []byte) error {
	n, err := im.w.Write(b)
	im.size += int64(n)
	return err
}

func (im *image) pad() error { return im.write(make([]byte, -im.size&3)) }

func (im *image) close() error {
	if err := im.entry("TRAILER!!!", 0, nil); err != nil {
		return err
	}
	return im.w.Flush()
}

// file copies a file of this machine, to the same name if to is empty.
func (im *image) file(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	if to == "" {
		to = from
	}
	return im.add(to, st.Mode().Perm(), data)
}

// program copies a program of this machine, and the libraries that it is linked
// with, to where their loader looks for them.
func (im *image) program(name string) error {
	at, err := exec.LookPath(name)
	if err != nil {
		return err
	}
	if err := im.file(at, path.Join("/usr/bin", path.Base(name))); err != nil {
		return err
	}
	said, err := exec.Command("ldd", at).CombinedOutput()
	if err != nil {
		if bytes.Contains(said, []byte("not a dynamic executable")) {
			return nil
		}
		return fmt.Errorf("ldd %s: %w: %s", at, err, said)
	}
	for f := range strings.FieldsSeq(string(said)) {
		if !strings.HasPrefix(f, "/") || im.has[f] {
			continue
		}
		if err := im.file(f, ""); err != nil {
			return err
		}
	}
	return nil
}

// shell adds the shell and what it calls.
func (im *image) shell() error {
	for _, name := range []string{"sh", "true", "sleep", "cat", "mount", "id", "uname", "ls", "dmesg", "readlink", "grep", "sed", "ps", "kill", "vi", "less", "head", "tail", "tee", "find", "echo", "mkdir", "rm", "cp", "ifconfig", "seq"} {
		if err := im.add("/bin/"+name, fs.ModeSymlink|0o777, []byte("/usr/bin/busybox")); err != nil {
			return err
		}
	}
	return nil
}

// module is a file of a kernel's, and the names of those that it needs.
type module struct {
	data  []byte
	needs []string
}

// readModules are those of a kernel by name, read when they are asked for.
func findModules(root string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name, _, ok := strings.Cut(d.Name(), ".ko"); ok && d.Type().IsRegular() {
			files[strings.ReplaceAll(name, "-", "_")] = p
		}
		return nil
	})
	return files, err
}

func readModule(file string) (m module, err error) {
	switch path.Ext(file) {
	case ".xz":
		m.data, err = exec.Command("xz", "-dc", file).Output()
	case ".zst":
		m.data, err = exec.Command("zstd", "-dc", file).Output()
	default:
		m.data, err = os.ReadFile(file)
	}
	if err != nil {
		return m, fmt.Errorf("read module %s: %w", file, err)
	}
	e, err := elf.NewFile(bytes.NewReader(m.data))
	if err != nil {
		return m, fmt.Errorf("read module %s: %w", file, err)
	}
	defer e.Close()
	info := e.Section(".modinfo")
	if info == nil {
		return m, fmt.Errorf("module %s says nothing of itself", file)
	}
	text, err := info.Data()
	if err != nil {
		return m, fmt.Errorf("read module %s: %w", file, err)
	}
	for s := range strings.SplitSeq(string(text), "\x00") {
		for _, key := range []string{"depends=", "softdep=pre: "} {
			if v, ok := strings.CutPrefix(s, key); ok {
				m.needs = append(m.needs, strings.FieldsFunc(v, func(r rune) bool { return r == ',' || r == ' ' })...)
			}
		}
	}
	return m, nil
}

// modules puts modules into the image, and the order in which they can be
// loaded.
func (im *image) modules(root string, want []string) error {
	files, err := findModules(root)
	if err != nil {
		return err
	}
	var order []string
	done := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		name = strings.ReplaceAll(name, "-", "_")
		file := files[name]
		if done[name] || file == "" {
			return nil
		}
		done[name] = true
		m, err := readModule(file)
		if err != nil {
			return err
		}
		for _, n := range m.needs {
			if err := visit(n); err != nil {
				return err
			}
		}
		to := "/lib/modules/" + name + ".ko"
		order = append(order, to)
		return im.add(to, 0o644, m.data)
	}
	for _, name := range want {
		if err := visit(name); err != nil {
			return err
		}
	}
	return im.add(modulesFile, 0o644, []byte(strings.Join(order, "\n")+"\n"))
}

// tree puts the files that git knows into the image: tests read examples,
// vectors and documents.
func (im *image) tree(top string) error {
	out, err := exec.Command("git", "-C", top, "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return fmt.Errorf("ask git for the files of %s: %w", top, err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if path.Ext(name) == ".o" {
			continue
		}
		err := im.file(filepath.Join(top, name), path.Join(guestTree, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// contents is what goes into an image besides modules.
type contents struct {
	top      string            // of the repository
	built    map[string]string // file of the image: what was built for it
	programs []string          // of this machine; none: it is of another architecture
	also     []string          // of this machine, where it has them
	steps    []guestStep
}

func writeImage(file, modulesRoot string, c contents) (err error) {
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	im := newImage(f)
	for _, to := range slices.Sorted(maps.Keys(c.built)) {
		if err := im.file(c.built[to], to); err != nil {
			return err
		}
	}
	for _, p := range c.programs {
		if err := im.program(p); err != nil {
			return err
		}
	}
	for _, p := range c.also {
		if _, err := exec.LookPath(p); err != nil {
			continue
		}
		if err := im.program(p); err != nil {
			return err
		}
	}
	if len(c.programs) > 0 {
		if err := im.shell(); err != nil {
			return err
		}
	}
	if err := im.add("/etc/passwd", 0o644, []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")); err != nil {
		return err
	}
	// Names of protocols in rules of nft, which libc looks up.
	if err := im.add("/etc/protocols", 0o644, []byte("icmp 1 ICMP\ntcp 6 TCP\nudp 17 UDP\nipv6-icmp 58 IPv6-ICMP\nsctp 132 SCTP\n")); err != nil {
		return err
	}
	// Daemons of FRR run as a member of the group that may talk to them, and keep files there.
	if err := im.add("/etc/group", 0o644, []byte("root:x:0:\nfrrvty:x:100:root\nnogroup:x:65534:\n")); err != nil {
		return err
	}
	for _, dir := range []string{"/var/tmp", "/var/run"} {
		if err := im.add(dir, fs.ModeDir|0o755, nil); err != nil {
			return err
		}
	}
	if err := im.modules(modulesRoot, modules); err != nil {
		return err
	}
	if err := im.tree(c.top); err != nil {
		return err
	}
	text, err := json.Marshal(c.steps)
	if err != nil {
		return err
	}
	if err := im.add(stepsFile, 0o644, text); err != nil {
		return err
	}
	return im.close()
}
