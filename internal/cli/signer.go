package cli

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/user"
	"strconv"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/signer"
)

// NewSignerCommand is the process that has a service's key.
func NewSignerCommand() *cobra.Command {
	var key, socket, group string
	cmd := &cobra.Command{
		Use:   "signer --key FILE --socket PATH",
		Short: "Sign handshakes of a service for its gateway, with a key that the gateway does not have",
		Long: `Read a private key, and sign with it what a gateway asks over a unix socket: the handshakes of
TLS 1.3 of its clients, and nothing else. The domain file names the socket:

  certificate: {file: shop.pem, signer: /run/shop-signer.sock}

Run it on the gateway's node, as a user of its own to whom the key belongs (mode 0600). The
socket is for that user and root; with --group for a group as well, if the agent is not root.
Whoever can connect can have handshakes signed, and so can pose as the service as long as
that lasts.

This is the reference for the protocol, docs/protocol/signer.md, which a program
for a token, a TPM or a key service can speak in its place.`,
		Example: `  waystamp signer --key shop.key --socket /run/shop-signer.sock`,
		Args:    command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if key == "" || socket == "" {
				return command.Usagef("--key and --socket are both needed, as in waystamp signer --key shop.key --socket /run/shop-signer.sock")
			}
			gid := -1
			if group != "" {
				g, err := user.LookupGroup(group)
				if err != nil {
					return command.Usagef("--group: %v", err)
				}
				if gid, err = strconv.Atoi(g.Gid); err != nil {
					return err
				}
			}
			k, err := readKey(key)
			if err != nil {
				return err
			}
			l, err := listenPrivately(socket, gid)
			if err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			log.Info("signing", "socket", socket)
			return signer.Serve(cmd.Context(), l, k, log)
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "`file` with the private key, in PEM, that nobody else may read")
	cmd.Flags().StringVar(&socket, "socket", "", "`path` of the socket to listen at")
	cmd.Flags().StringVar(&group, "group", "", "`name` of a group whose members may ask")
	return cmd
}

// readKey reads a private key as gateways take it. Its errors say nothing of the content.
func readKey(name string) (crypto.Signer, error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("%s: others may read the key (mode %04o); chmod 600 it", name, mode)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	for {
		var b *pem.Block
		if b, text = pem.Decode(text); b == nil {
			return nil, fmt.Errorf("%s: there is no private key in PEM that could be read", name)
		}
		var key any
		switch b.Type {
		case "PRIVATE KEY":
			key, err = x509.ParsePKCS8PrivateKey(b.Bytes)
		case "EC PRIVATE KEY":
			key, err = x509.ParseECPrivateKey(b.Bytes)
		case "RSA PRIVATE KEY":
			key, err = x509.ParsePKCS1PrivateKey(b.Bytes)
		default:
			continue
		}
		k, ok := key.(crypto.Signer)
		if err != nil || !ok {
			return nil, fmt.Errorf("%s: there is no private key in PEM that could be read", name)
		}
		if err := signer.CheckKey(k.Public()); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		return k, nil
	}
}

// listenPrivately makes a socket for this user, and a group if gid is not -1. Nobody else can connect at any time.
func listenPrivately(path string, gid int) (net.Listener, error) {
	if c, err := net.Dial("unix", path); err == nil {
		return nil, errors.Join(fmt.Errorf("another process listens at %s: stop it, or give another --socket", path), c.Close())
	} else if errors.Is(err, unix.ECONNREFUSED) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the socket that another process has left: %w", err)
		}
	}
	before := unix.Umask(0o177)
	l, err := net.Listen("unix", path)
	unix.Umask(before)
	if err != nil || gid < 0 {
		return l, err
	}
	if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, 0o660)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
