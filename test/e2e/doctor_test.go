package e2e

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The doctor in a process that lacks something of a machine's: it says what, and how to
// mend it; with --fix it does what cannot open a hole.
func TestDoctorFindsWhatAProcessLacks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	doctor := program + " doctor --run-dir " + filepath.Join(dir, "run") + " --state-dir " + filepath.Join(dir, "state")
	for name, c := range map[string]struct {
		how  []string
		code int
		says []string
	}{
		"all": {[]string{"sh", "-c", doctor}, 0, []string{"this machine is fit"}},
		"no rights": {[]string{"setpriv", "--bounding-set=-all", "--inh-caps=-all", "sh", "-c", doctor}, 1, []string{
			"fatal    rights: this process lacks CAP_NET_ADMIN", "fatal    rights: this process lacks CAP_BPF", "mend it: run as root",
		}},
		"no bpf file system": {[]string{"unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /sys/fs/bpf && " + doctor}, 1, []string{
			"fatal    bpf-fs: /sys/fs/bpf/waystamp is not on a bpf file system", "mend it: mount -t bpf bpf /sys/fs/bpf",
		}},
		"no bpf file system, and it mends that": {
			// Its shell is process 1 there, so that these mounts are taken for the machine's.
			[]string{"unshare", "-m", "-p", "-f", "--mount-proc", "sh", "-c", "mount -t tmpfs tmpfs /sys/fs/bpf && " + doctor + " --fix && grep -q ' /sys/fs/bpf bpf ' /proc/mounts"},
			0, []string{"doctor: mount -t bpf bpf /sys/fs/bpf", "this machine is fit"},
		},
		"no /sys, as in a container": {[]string{"unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /sys && " + doctor}, 1, []string{
			"fatal    bpf-fs: /sys/fs/bpf does not exist: /sys is not the kernel's here", "mend it: mount -t sysfs sysfs /sys; in a container, share the host's /sys/fs/bpf",
		}},
		"few files": {[]string{"sh", "-c", "ulimit -n 512 && " + doctor}, 1, []string{"a process may have 512 files open"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.CommandContext(t.Context(), c.how[0], c.how[1:]...).CombinedOutput()
			code := 0
			if ended := new(exec.ExitError); errors.As(err, &ended) {
				code = ended.ExitCode()
			} else {
				must(t, err)
			}
			if code != c.code {
				t.Errorf("exit %d, want %d:\n%s", code, c.code, out)
			}
			for _, s := range c.says {
				if !strings.Contains(string(out), s) {
					t.Errorf("it does not say %q:\n%s", s, out)
				}
			}
		})
	}
}
