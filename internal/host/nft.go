package host

import (
	"context"
	"errors"
	"fmt"
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

// FiltersForwarded tells whether the packet filter of the namespace looks at packets that the kernel forwards: there is a
// chain at hook forward, by nft or iptables.
func (n *Net) FiltersForwarded() (bool, error) {
	if err := RequireNft(); err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	said, err := Command(ctx, n.ns, "nft", "list", "chains").CombinedOutput()
	if err != nil {
		return false, fmt.Errorf("nft list chains: %w: %s", err, strings.TrimSpace(string(said)))
	}
	return strings.Contains(string(said), "hook forward"), nil
}
