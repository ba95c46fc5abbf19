package planfile

import (
	"encoding/binary"
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
	list := func(path string, tag, permissions uint16, id uint32) {
		must(t, unix.Setxattr(path, aclName, credentialACL(tag, permissions, id), 0))
	}
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
		"a credential of systemd":     {spoil: func(p place) { list(p.file, aclUser, 4, 0) }},
		"a list for its user alone":   {spoil: func(p place) { list(p.file, aclUser, 0, nobody) }},
		"a list for somebody else":    {spoil: func(p place) { list(p.file, aclUser, 4, nobody) }, says: []string{"lets user 65534 use it", "chmod 600 "}},
		"a list for a group":          {spoil: func(p place) { list(p.file, aclGroup, 4, 0) }, says: []string{"lets a group use it"}},
		"a list, and for all":         {spoil: func(p place) { list(p.file, aclUser, 4, 0); mode(p.file, 0o444) }, says: []string{"has mode 0444"}},
		"a list, and for its group":   {spoil: func(p place) { list(p.file, aclGroupOwner, 4, 0) }, says: []string{"lets a group use it"}},
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

// credentialACL is the list that systemd gives a credential, for a user (fd_add_uid_acl_permission), with one entry of another kind.
func credentialACL(tag, permissions uint16, id uint32) []byte {
	b := binary.LittleEndian.AppendUint32(nil, aclVersion)
	add := func(tag, permissions uint16, id uint32) {
		b = binary.LittleEndian.AppendUint16(b, tag)
		b = binary.LittleEndian.AppendUint16(b, permissions)
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	const undefined = 0xffffffff
	of := func(t uint16) uint16 {
		if t == tag {
			return permissions
		}
		return 0
	}
	add(aclUserOwner, 4, undefined)
	if tag == aclUser {
		add(aclUser, permissions, id)
	}
	add(aclGroupOwner, of(aclGroupOwner), undefined)
	if tag == aclGroup {
		add(aclGroup, permissions, id)
	}
	add(aclMask, 4, undefined)
	add(aclOther, of(aclOther), undefined)
	return b
}

func TestAListIsReadAsTheKernelApplies(t *testing.T) {
	for name, c := range map[string]struct {
		acl []byte
		me  uint32
		is  string // of which, or of the error
		bad bool
	}{
		"mine":               {acl: credentialACL(aclUser, 4, 1000), me: 1000},
		"root's":             {acl: credentialACL(aclUser, 4, 0), me: 1000},
		"another's":          {acl: credentialACL(aclUser, 4, 1001), me: 1000, is: "lets user 1001 use it"},
		"beyond the mask":    {acl: credentialACL(aclUser, 2, 1001), me: 1000},
		"everybody's":        {acl: credentialACL(aclOther, 4, 0), me: 1000, is: "lets everybody use it"},
		"an unknown entry":   {acl: credentialACLWith(0x40), me: 1000, is: "tag 0x40", bad: true},
		"of another version": {acl: append([]byte{3}, credentialACL(aclUser, 4, 1000)[1:]...), me: 1000, is: "form", bad: true},
		"cut off":            {acl: credentialACL(aclUser, 4, 1000)[:9], me: 1000, is: "form", bad: true},
		"empty":              {me: 1000, is: "form", bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			which, err := othersInACL(c.acl, c.me)
			if (err != nil) != c.bad || c.bad && !strings.Contains(err.Error(), c.is) {
				t.Fatalf("got %q, %v", which, err)
			}
			if !c.bad && ((which == "") != (c.is == "") || !strings.Contains(which, c.is)) {
				t.Errorf("got %q, want %q", which, c.is)
			}
		})
	}
}

// credentialACLWith is a list with one more entry.
func credentialACLWith(tag uint16) []byte {
	b := binary.LittleEndian.AppendUint16(credentialACL(aclUser, 4, 1000), tag)
	return append(b, make([]byte, 6)...)
}

func TestAFileThatIsNotThere(t *testing.T) {
	if _, err := Read(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}
