package host

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"time"
)

// ErrNoNft means that the program nft is not installed.
var ErrNoNft = errors.New("there is no program nft; install the package nftables")

// RequireNft checks that rulesets can be loaded on this machine at all.
func RequireNft() error {
	if _, err := exec.LookPath("nft"); err != nil {
		return ErrNoNft
	}
	return nil
}

// LoadRuleset adds nftables rules, in the format of nft -f, to the rules of the namespace. nft
// loads all of them or none. The error has the position of a mistake in the ruleset.
func (n *Net) LoadRuleset(ctx context.Context, ruleset string) error {
	if err := RequireNft(); err != nil {
		return err
	}
	cmd := Command(ctx, n.ns, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(ruleset)
	said, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	text := strings.ReplaceAll(strings.TrimSpace(string(said)), "/dev/stdin:", "line ")
	if text == "" {
		return fmt.Errorf("nft: %w", err)
	}
	return fmt.Errorf("nft says: %s", text)
}

// FiltersForwarded tells whether the packet filter of the namespace looks at packets that the kernel forwards: nftables has a
// chain at hook forward for packets of IP, or there are tables of iptables' own (iptables-legacy).
func (n *Net) FiltersForwarded() (bool, error) {
	legacy := false
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		err := n.ns.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/" + file)
			legacy = legacy || len(b) > 0
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, fmt.Errorf("look for the tables of iptables in %s: %w", n.ns, err)
		}
	}
	if legacy {
		return true, nil
	}
	if err := RequireNft(); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, family := range []string{"inet", "ip", "ip6"} {
		said, err := Command(ctx, n.ns, "nft", "list", "chains", family).CombinedOutput()
		if err != nil {
			return false, fmt.Errorf("nft list chains %s: %w: %s", family, err, strings.TrimSpace(string(said)))
		}
		if strings.Contains(string(said), "hook forward") {
			return true, nil
		}
	}
	return false, nil
}
