package planfile

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const nobody = 65534

func TestFilesWithKeysAreTheirOwnersAlone(t *testing.T) {
	// What is wrong with the file, its directory, or the link to it.
	type place struct{ dir, file, linkDir, link string }
	mode := func(path string, mode uint32) { must(t, unix.Chmod(path, mode)) }
	for name, c := range map[string]struct {
		spoil func(place)
		byDir bool // the directory is at fault
		link  bool // read by the link
		says  []string
	}{
		"as it is written":            {spoil: func(place) {}},
		"read only":                   {spoil: func(p place) { mode(p.file, 0o400) }},
		"readable by all":             {spoil: func(p place) { mode(p.file, 0o644) }, says: []string{"has mode 0644", "chmod 600 "}},
		"readable by its group":       {spoil: func(p place) { mode(p.file, 0o640) }, says: []string{"has mode 0640", "chmod 600 "}},
		"writable by others":          {spoil: func(p place) { mode(p.file, 0o602) }, says: []string{"has mode 0602", "chmod 600 "}},
		"somebody else's":             {spoil: func(p place) { must(t, os.Chown(p.file, nobody, 0)) }, says: []string{"belongs to user 65534", "chown 0 "}},
		"a directory for all":         {spoil: func(p place) { mode(p.dir, 0o777) }, byDir: true, says: []string{"has mode 0777", "chmod go-w "}},
		"a directory for a group":     {spoil: func(p place) { mode(p.dir, 0o770) }, byDir: true, says: []string{"has mode 0770", "chmod go-w "}},
		"a sticky directory for all":  {spoil: func(p place) { mode(p.dir, 0o777|unix.S_ISVTX) }},
		"a directory others read":     {spoil: func(p place) { mode(p.dir, 0o755) }},
		"somebody else's directory":   {spoil: func(p place) { must(t, os.Chown(p.dir, nobody, 0)) }, byDir: true, says: []string{"belongs to user 65534", "chown 0 "}},
		"by a link":                   {spoil: func(place) {}, link: true},
		"by a link, readable by all":  {spoil: func(p place) { mode(p.file, 0o644) }, link: true, says: []string{"has mode 0644"}},
		"by a link, to where all are": {spoil: func(p place) { mode(p.dir, 0o777) }, link: true, says: []string{"has mode 0777"}},
		"by a link where all are":     {spoil: func(p place) { mode(p.linkDir, 0o777) }, link: true, says: []string{"has mode 0777"}},
	} {
		t.Run(name, func(t *testing.T) {
			if os.Geteuid() != 0 && strings.Contains(name, "somebody") {
				t.Fatal("only root can give a file away: run this as root")
			}
			top := t.TempDir()
			p := place{filepath.Join(top, "d"), filepath.Join(top, "d", "r1.json"), filepath.Join(top, "l"), filepath.Join(top, "l", "r1.json")}
			must(t, errors.Join(os.Mkdir(p.dir, 0o700), os.Mkdir(p.linkDir, 0o700), os.WriteFile(p.file, []byte("keys"), 0o600), os.Symlink(p.file, p.link)))
			c.spoil(p)
			path := p.file
			if c.link {
				path = p.link
			}
			b, err := Read(path)
			if len(c.says) == 0 {
				if err != nil || string(b) != "keys" {
					t.Fatalf("got %q, %v", b, err)
				}
				return
			}
			e, ok := errors.AsType[*InsecureError](err)
			if !ok || b != nil {
				t.Fatalf("got %q, %v; want it refused", b, err)
			}
			if c.byDir && e.Path != p.dir {
				t.Errorf("%s is at fault; want %s", e.Path, p.dir)
			}
			for _, says := range append(c.says, e.Path) {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("says %q, without %q", err, says)
				}
			}
			if b, insecure, err := ReadAnyway(path); string(b) != "keys" || insecure == nil || err != nil {
				t.Errorf("all the same: got %q, %v, %v", b, insecure, err)
			}
		})
	}
}

func TestAFileThatIsNotThere(t *testing.T) {
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
