package cli

import (
	"crypto"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/command"
	"github.com/waystamp/waystamp/internal/gateway"
)

// NewAuditCommand has the commands on audit logs.
func NewAuditCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "audit", Short: "Look at the audit log of a gateway"}
	cmd.AddCommand(newAuditVerifyCommand())
	return cmd
}

func newAuditVerifyCommand() *cobra.Command {
	var o auditOptions
	cmd := &cobra.Command{
		Use:   "verify FILE",
		Short: "Check that no line of an audit log was changed, removed or put in",
		Long: `Each line of an audit log has a number and the hash of the line before. This
command reads the log to its end, and names the first line that does not follow
from the one before. FILE - is standard input.

The agent signs the log with its node's key, every 1000 lines or 10 seconds, into
FILE.sig. Each signature is checked, and the lines behind the last one are counted:
they are not signed yet. --ca has the roots that the node's certificate must lead to:
a file in PEM, or one of waystamp operator add. --key has a public key or a
certificate that signs; a key that it signed for may follow it. Without both, signatures
are only held against the keys that FILE.sig names, which who wrote it could have made.

It prints the number of lines, and the hash of the last line. Keep both on another
machine: a user who can write both files can cut both behind an earlier signature,
and whoever has the key can write all of it again; only this hash shows that.

Exit code 0 if every line follows and every signature is right, 4 if one is not, or if
there are none and --ca or --key is given.`,
		Example: `  waystamp audit verify audit.log
  waystamp audit verify audit.log --ca operator.json --node r1
  waystamp audit verify audit.log --key gateway-key.pub`,
		Args: command.UsageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := o.trust()
			if err != nil {
				return err
			}
			v, err := await.Do(cmd.Context(), func() (gateway.Verified, error) { return o.verify(args[0], cmd.InOrStdin(), t) })
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%d lines, each follows from the one before\nhash of the last line: %s\n", v.Lines, hex.EncodeToString(v.Last[:]))
			_, err = fmt.Fprint(cmd.OutOrStdout(), signedWords(v))
			return err
		},
	}
	cmd.Flags().StringArrayVar(&o.keys, "key", nil, "`file` with a public key or a certificate (PEM) that signs the log; may be given again")
	cmd.Flags().StringVar(&o.ca, "ca", "", "`file` with the roots that certificates of nodes lead to: PEM, or of waystamp operator add")
	cmd.Flags().StringVar(&o.node, "node", "", "`name` of the node that must have signed (default: any, but all by one); goes with --ca")
	cmd.Flags().StringVar(&o.signatures, "signatures", "", "`file` of the signatures (default FILE.sig, if it is there)")
	return cmd
}

type auditOptions struct {
	keys                 []string
	ca, node, signatures string
}

// signedWords are the lines about signatures.
func signedWords(v gateway.Verified) string {
	s := v.Signed
	if s == nil {
		return "not signed\n"
	}
	if s.Count == 0 {
		return "not signed yet\n"
	}
	by := "key " + s.Key
	if s.Node != "" {
		by = fmt.Sprintf("node %s, %s", s.Node, by)
	}
	text := fmt.Sprintf("signed up to line %d at %s by %s\n", s.Lines, s.Time.UTC().Format(time.RFC3339), by)
	if n := v.Lines - s.Lines; n > 0 {
		text += fmt.Sprintf("%d lines behind it are not signed yet\n", n)
	}
	if s.Late > 0 {
		text += fmt.Sprintf("%d signatures were made after their certificate had ended: did the node reach its controller?\n", s.Late)
	}
	if !s.Trusted {
		text += "whose key that is, nothing says: give --ca or --key\n"
	}
	return text
}

func (o *auditOptions) trust() (t gateway.Trust, err error) {
	if o.node != "" && o.ca == "" {
		return t, command.Usagef("--node goes with --ca")
	}
	t.Node = o.node
	for _, name := range o.keys {
		text, err := os.ReadFile(name)
		if err != nil {
			return t, fmt.Errorf("--key: %w", err)
		}
		key, err := publicKey(text)
		if err != nil {
			return t, fmt.Errorf("--key %s: %w", name, err)
		}
		t.Keys = append(t.Keys, key)
	}
	if o.ca != "" {
		text, err := os.ReadFile(o.ca)
		if err != nil {
			return t, fmt.Errorf("--ca: %w", err)
		}
		if t.Roots, err = rootsIn(text); err != nil {
			return t, fmt.Errorf("--ca %s: %w", o.ca, err)
		}
	}
	return t, nil
}

// publicKey reads a public key, or that of a certificate.
func publicKey(text []byte) (key crypto.PublicKey, err error) {
	block, _ := pem.Decode(text)
	switch {
	case block == nil:
		return nil, errors.New("there is no public key or certificate in PEM")
	case block.Type == "CERTIFICATE":
		var c *x509.Certificate
		if c, err = x509.ParseCertificate(block.Bytes); err == nil {
			key = c.PublicKey
		}
	case block.Type == "PUBLIC KEY":
		key, err = x509.ParsePKIXPublicKey(block.Bytes)
	case strings.HasSuffix(block.Type, "PRIVATE KEY"):
		return nil, errors.New("it is a private key; openssl pkey -pubout makes the public one of it")
	default:
		return nil, fmt.Errorf("it is %q; expect a public key or a certificate", block.Type)
	}
	if err != nil {
		return nil, err
	}
	return key, gateway.CheckAuditKey(key)
}

// rootsIn reads roots in PEM, or those of an operator's file.
func rootsIn(text []byte) (roots []*x509.Certificate, err error) {
	var der [][]byte
	var operator struct{ Roots [][]byte }
	if json.Unmarshal(text, &operator) == nil {
		der = operator.Roots
	}
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			break
		}
		if block.Type == "CERTIFICATE" {
			der = append(der, block.Bytes)
		}
	}
	if len(der) == 0 {
		return nil, errors.New("there is no certificate in it")
	}
	for _, d := range der {
		c, err := x509.ParseCertificate(d)
		if err != nil {
			return nil, err
		}
		if !c.IsCA {
			return nil, errors.New("a certificate in it is no authority's; that of a node goes with --key")
		}
		roots = append(roots, c)
	}
	return roots, nil
}

func (o *auditOptions) verify(name string, stdin io.Reader, t gateway.Trust) (v gateway.Verified, err error) {
	log, signatures := stdin, o.signatures
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return v, fmt.Errorf("read the audit log: %w", err)
		}
		defer f.Close()
		log = f
		if signatures == "" {
			if signatures = gateway.SignaturesOf(name); !isThere(signatures) {
				signatures = ""
			}
		}
	}
	// The log grows while it is read, and is signed: signatures that come meanwhile are of lines that come meanwhile.
	if signatures != "" {
		f, ferr := os.Open(signatures)
		if ferr != nil {
			return v, fmt.Errorf("read the signatures: %w", ferr)
		}
		defer f.Close()
		v, err = gateway.VerifySigned(log, f, t)
	} else {
		v, err = gateway.VerifyAudit(log)
	}
	trusted := len(t.Keys) > 0 || len(t.Roots) > 0
	if err == nil && trusted && v.Signed == nil {
		err = errors.New("there are no signatures; give --signatures if they are in another place")
	}
	if err == nil && trusted && v.Signed.Count == 0 && v.Lines > 0 {
		err = errors.New("none of its lines is signed")
	}
	if err != nil {
		return v, &command.ExitError{Code: command.ExitRefused, Err: fmt.Errorf("%s: %w", command.ShownName(name), err)}
	}
	return v, nil
}

func isThere(name string) bool {
	_, err := os.Lstat(name)
	return !errors.Is(err, fs.ErrNotExist)
}
