package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/manifest"
	"github.com/waystamp/waystamp/internal/model"
)

// UnlessAsked runs what leaves nothing behind wherever it is ended, and does not wait
// for it when the command is asked to end.
func UnlessAsked(ctx context.Context, f func() error) error {
	_, err := await.Do(ctx, func() (struct{}, error) { return struct{}{}, f() })
	return err
}

// ReadManifest reads a domain's file, or stdin for "-", and the rules of its functions,
// checks both and prints warnings. Files of services are checked if they are here.
func ReadManifest(ctx context.Context, name string, stdin io.Reader, stderr io.Writer) (manifest.Manifest, error) {
	m, err := await.Do(ctx, func() (manifest.Manifest, error) { return parseManifest(name, stdin) })
	if err != nil {
		return manifest.Manifest{}, err
	}
	for _, w := range m.Warnings {
		fmt.Fprintf(stderr, "%s:%d:%d: warning: %s\n", ShownName(name), w.Line, w.Column, w)
	}
	if err := completeRules(ctx, &m.Domain, name, stderr); err != nil {
		return manifest.Manifest{}, err
	}
	_, err = await.Do(ctx, func() (struct{}, error) { return struct{}{}, checkServices(m.Domain, name) })
	if err != nil {
		return manifest.Manifest{}, err
	}
	return m, nil
}

// checkServices looks at the certificates, keys and lists that services name, from the folder of the
// domain's file. Those that are not there are the gateway's node's to check.
func checkServices(d model.Domain, name string) error {
	errs := gateway.CheckFiles(d.Clients, d.Services, gateway.Folder(filepath.Dir(name)), time.Now())
	if err := errors.Join(errs...); err != nil {
		return &ExitError{Code: ExitUsage, Err: err}
	}
	return nil
}

// ShownName is what messages call a file.
func ShownName(name string) string {
	if name == "-" {
		return "<stdin>"
	}
	return name
}

func parseManifest(name string, stdin io.Reader) (manifest.Manifest, error) {
	in := stdin
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return manifest.Manifest{}, fmt.Errorf("read the domain's file: %w", err)
		}
		defer f.Close()
		in = f
	}
	name = ShownName(name)
	// One byte more than is allowed is enough to be refused.
	src, err := io.ReadAll(io.LimitReader(in, manifest.SourceMax+1))
	if err != nil {
		return manifest.Manifest{}, fmt.Errorf("read the domain's file: %w", err)
	}
	var written struct{ Kind string }
	if json.Unmarshal(src, &written) == nil && written.Kind != "" {
		return manifest.Manifest{}, Usagef("%s is not a domain file: its kind is %q, as in files that waystamp plan --out writes; give the domain file", name, written.Kind)
	}
	m, err := manifest.Parse(name, src)
	if err != nil {
		if e, ok := errors.AsType[*manifest.Error](err); ok && len(e.Problems) > 1 {
			err = fmt.Errorf("%w\n%s has %d problems", err, name, len(e.Problems))
		}
		return manifest.Manifest{}, &ExitError{Code: ExitUsage, Err: err}
	}
	return m, nil
}
