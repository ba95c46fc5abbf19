package doctor

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/waystamp/waystamp/internal/plan"
)

// Without rights nothing can be said about the kernel: not even that it lacks something.
// As root the test binary runs again as a user who has none.
func TestWithoutRightsTheKernelIsNotBlamed(t *testing.T) {
	if os.Geteuid() == 0 {
		exe, err := os.Open("/proc/self/exe")
		must(t, err)
		defer exe.Close()
		cmd := exec.CommandContext(t.Context(), "/proc/self/fd/3", "-test.run=^TestWithoutRightsTheKernelIsNotBlamed$")
		cmd.ExtraFiles = []*os.File{exe} // the folder it is in is closed to that user
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534, NoSetGroups: true}}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("as another user: %v\n%s", err, out)
		}
		return
	}
	for _, f := range append(programs(), extras()...) {
		if strings.Contains(f.Says, "netdev") { // netlink tells it to everybody
			continue
		}
		if f.Verdict != Unknown || !strings.Contains(f.Says, "CAP_NET_ADMIN is missing; run as root") {
			t.Errorf("%+v; want that it is not known, for want of a capability", f)
		}
	}
	stream := plan.Node{Proxies: []plan.Proxy{{Function: "gzip", Stream: &plan.Stream{}}}}
	lacks := planCapabilities(stream)
	if len(lacks) != 7 || lacks[0].Says != "this process lacks CAP_SYS_ADMIN" || lacks[0].Weight != Warning {
		t.Errorf("for a function of kind stream: %+v", lacks)
	}
	for _, f := range lacks {
		if f.Verdict != No || !strings.HasPrefix(f.Mend, "run as root, which has CAP_") {
			t.Errorf("%+v", f)
		}
	}
	if lacks := planCapabilities(plan.Node{Proxies: []plan.Proxy{{Function: "nft", Netfilter: &plan.Netfilter{}}}}); len(lacks) != 1 {
		t.Errorf("for one of kind netfilter: %+v", lacks)
	}
	if lacks := planCapabilities(plan.Node{Proxies: []plan.Proxy{{Function: "fw"}}}); len(lacks) != 0 {
		t.Errorf("for one of kind unaware: %+v", lacks)
	}
	if f := pins("/sys/fs/bpf", ""); f.Verdict == No && !strings.HasPrefix(f.Mend, "run as root") && strings.Contains(f.Says, "cannot write") {
		t.Errorf("%+v; want to be told to run as root", f)
	}
	if f := directory("run-dir", "/sys/x", false); f.Verdict != No || !strings.HasPrefix(f.Mend, "run as root") {
		t.Errorf("%+v; want to be told to run as root", f)
	}
}
