package host

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
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

// LoadRuleset loads rules of nftables, as nft -f reads them, beside those that
// the namespace has. nft does all of it or nothing. The error says where in the
// ruleset it is wrong.
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
