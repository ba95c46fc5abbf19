package dataplane

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
)

// OldestKernel is the oldest Linux that the programs are tested on.
var OldestKernel = [2]int{6, 1}

// Check checks whether this process and this kernel can run the data path. It changes nothing.
func Check() error {
	if err := checkCapabilities(); err != nil {
		return err
	}
	for _, f := range []struct {
		name, min string
		probe     func() error
	}{
		{"eBPF programs at TC", "4.1", func() error { return features.HaveProgramType(ebpf.SchedCLS) }},
		{"eBPF programs at XDP", "4.8", func() error { return features.HaveProgramType(ebpf.XDP) }},
		{"eBPF instruction set v3", "5.1", features.HaveV3ISA},
		{"bounded loops in eBPF", "5.3", features.HaveBoundedLoops},
		{"eBPF ring buffers", "5.8", func() error { return features.HaveMapType(ebpf.RingBuf) }},
		{"loops in eBPF by a helper", "5.17", haveLoop},
	} {
		err := f.probe()
		if errors.Is(err, ebpf.ErrNotSupported) {
			return &host.UnsupportedError{Feature: f.name, Min: f.min}
		}
		if err != nil {
			return fmt.Errorf("find out whether the kernel has %s: %w", f.name, err)
		}
	}
	return nil
}

// haveDecapL3 finds out whether the kernel has a flag for an inner packet of IPv4 (Linux 6.3):
// it removes 20 bytes from a packet of zeros. Without the flag the programs use another way,
// with one more call.
func haveDecapL3() (bool, error) {
	const (
		gone      = 20
		room      = 1               // BPF_ADJ_ROOM_MAC
		fixedGSO  = 1 << 0          // BPF_F_ADJ_ROOM_FIXED_GSO
		decapIPv4 = 1<<7 | fixedGSO // BPF_F_ADJ_ROOM_DECAP_L3_IPV4
	)
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "ws_probe_decap", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, -gone), asm.Mov.Imm(asm.R3, room), asm.Mov.Imm(asm.R4, decapIPv4),
			asm.FnSkbAdjustRoom.Call(), asm.Return(),
		},
	})
	if err != nil {
		return false, fmt.Errorf("find out whether the kernel takes an outer header off IPv4: %w", err)
	}
	defer p.Close()
	frame := make([]byte, 14+40+20)
	frame[12], frame[13], frame[14] = 0x86, 0xdd, 0x60
	rc, err := p.Run(&ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+512)})
	if err != nil {
		return false, fmt.Errorf("find out whether the kernel takes an outer header off IPv4: %w", err)
	}
	return rc == 0, nil
}

// errNoLookUp means that the kernel does not allow programs to look up flows.
var errNoLookUp = &host.UnsupportedError{
	Feature: "look-up of flows in connection tracking by programs (bpf_skb_ct_lookup), which bypass: established needs",
	Config:  "Linux 5.18 with CONFIG_NF_CONNTRACK, CONFIG_NF_CONNTRACK_MARK and CONFIG_DEBUG_INFO_BTF, and the module nf_conntrack loaded (modprobe nf_conntrack) where it is one",
}

// noTCX reports whether filters of clsact attach programs at TC.
func noTCX(c Config) (bool, error) {
	if c.clsact {
		return true, nil
	}
	err := haveTCX()
	if !errors.Is(err, ebpf.ErrNotSupported) {
		return false, err
	}
	if c.Net == nil {
		return false, &host.UnsupportedError{Feature: "tcx (programs at TC by link)", Min: "6.6"}
	}
	return true, nil
}

// haveLoop checks for the newest necessary feature that can be checked: bpf_loop.
func haveLoop() error { return features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop) }

// HasTCX tells whether the kernel has programs at TC by links (Linux 6.6); otherwise filters of clsact hold them.
func HasTCX() (bool, error) {
	err := haveTCX()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return false, nil
	}
	return err == nil, err
}

// haveTCX queries the programs of the loopback interface, which every namespace has as its
// first.
func haveTCX() error {
	// Without them the library takes the refusal for a kernel that lacks the query.
	if err := checkCapabilities(); err != nil {
		return err
	}
	_, err := link.QueryPrograms(link.QueryOptions{Target: 1, Attach: ebpf.AttachTCXIngress})
	if errors.Is(err, unix.EINVAL) {
		return ebpf.ErrNotSupported
	}
	return err
}

func checkCapabilities() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of the process: %w", err)
	}
	has := func(c uint) bool { return data[c/32].Effective&(1<<(c%32)) != 0 }
	if !has(unix.CAP_NET_ADMIN) {
		return &host.PermissionError{Capability: "CAP_NET_ADMIN", For: "attach programs to interfaces"}
	}
	if has(unix.CAP_SYS_ADMIN) {
		return nil
	}
	if !has(unix.CAP_BPF) {
		return &host.PermissionError{Capability: "CAP_BPF", For: "load eBPF programs"}
	}
	if !has(unix.CAP_PERFMON) {
		return &host.PermissionError{Capability: "CAP_PERFMON", For: "load eBPF programs"}
	}
	return nil
}
