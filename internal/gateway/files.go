package gateway

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/waystamp/waystamp/internal/gateway/policy"
	"github.com/waystamp/waystamp/internal/model"
)

// Files are what certificates, keys and lists are read from.
type Files interface {
	// Read gives the content of a file of so many bytes at most, and its mode.
	Read(name string, most int64) ([]byte, fs.FileMode, error)
	// At is how messages name it.
	At(name string) string
}

// Folder is what names of files count from that are not absolute.
type Folder string

// At is where the file is.
func (f Folder) At(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(string(f), name)
}

// Read reads a file.
func (f Folder) Read(name string, most int64) ([]byte, fs.FileMode, error) {
	name = f.At(name)
	file, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, missing(name)
	}
	if err != nil {
		return nil, 0, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, 0, err
	}
	text, err := io.ReadAll(io.LimitReader(file, most+1))
	if err != nil {
		return nil, 0, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(text)) > most {
		return nil, 0, fmt.Errorf("%s has more than %d bytes", name, most)
	}
	return text, info.Mode(), nil
}

// missing is that a file is not there.
type missing string

func (m missing) Error() string { return string(m) + " is not there" }

func (m missing) Is(target error) bool { return target == fs.ErrNotExist }

// Snapshot has the content of files, for a process that opens none. It has keys: it goes
// to nobody else.
type Snapshot struct {
	Folder Folder
	Taken  map[string]Taken // by their names, as the configuration has them
}

// Taken is a file as it was.
type Taken struct {
	Text  []byte
	Mode  fs.FileMode
	Error string // why it could not be read
}

// TakeSnapshot reads all files that clients and services name. That one cannot be read shows when it is loaded.
func TakeSnapshot(folder string, clients []model.Clients, services []model.Service) Snapshot {
	s := Snapshot{Folder(folder), map[string]Taken{}}
	for _, name := range namesOf(clients, services) {
		// Loading has a bound for each kind of file.
		text, mode, err := s.Folder.Read(name, listMax)
		t := Taken{Text: text, Mode: mode}
		if err != nil {
			t.Error = err.Error()
		}
		s.Taken[name] = t
	}
	return s
}

// namesOf are the files that clients and services name.
func namesOf(clients []model.Clients, services []model.Service) []string {
	var names []string
	for _, c := range clients {
		names = append(names, c.CA, c.CRL)
	}
	for _, s := range services {
		names = append(names, s.Certificate, s.Key, s.Origin.CA)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(n string) bool { return n == "" })
}

// Stamp tells whether files have changed: it is another text after they have, but for a change within the file system's clock
// that leaves size and inode as they were. It opens nothing.
func Stamp(folder string, clients []model.Clients, services []model.Service) string {
	text := ""
	for _, name := range namesOf(clients, services) {
		info, err := os.Stat(Folder(folder).At(name))
		if err != nil {
			text += name + " is not there\n"
			continue
		}
		var inode uint64 // tells a file from one that has taken its name
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			inode = st.Ino
		}
		text += fmt.Sprintf("%s %d %d %o %d\n", name, info.ModTime().UnixNano(), info.Size(), info.Mode(), inode)
	}
	return text
}

// At is where the file was.
func (s Snapshot) At(name string) string { return s.Folder.At(name) }

// Read gives a file as it was.
func (s Snapshot) Read(name string, most int64) ([]byte, fs.FileMode, error) {
	t, ok := s.Taken[name]
	switch {
	case !ok:
		return nil, 0, fmt.Errorf("%s was not handed over", s.At(name))
	case t.Error != "":
		return nil, 0, errors.New(t.Error)
	case int64(len(t.Text)) > most:
		return nil, 0, fmt.Errorf("%s has more than %d bytes", s.At(name), most)
	}
	return t.Text, t.Mode, nil
}

// Load reads the files of services and of their clients. It names all mistakes at once.
func Load(files Files, clients []model.Clients, services []model.Service, now time.Time) ([]Service, error) {
	var errs []error
	groups := map[string]*Clients{}
	for _, c := range clients {
		g, err := loadClients(c, files, now)
		if err != nil {
			errs = append(errs, err)
		}
		groups[c.Name] = g
	}
	var out []Service
	for _, s := range services {
		in := Service{Name: s.Name, Hosts: s.Hosts, Address: s.Address, Port: s.Address.Port(), Clients: groups[s.Clients], Opaque: s.Opaque, Headers: s.Headers}
		var kind model.IdentityKind
		for _, c := range clients {
			if c.Name == s.Clients {
				kind = c.Kind
			}
		}
		var cerr, oerr, rerr error
		in.Certificate, cerr = loadCertificate(s, files, now)
		if s.Mode == model.ModeConnect {
			in.Destinations = map[string]netip.AddrPort{}
			for _, d := range s.Destinations {
				in.Destinations[d.Name()] = d.Address
			}
		} else {
			in.Origin, oerr = loadOrigin(s, files)
		}
		if in.Rules, rerr = policy.Compile(s, kind); rerr != nil {
			rerr = fmt.Errorf("service %s: %w", s.Name, rerr)
		}
		if _, ok := groups[s.Clients]; !ok {
			errs = append(errs, fmt.Errorf("service %s: there are no clients %q", s.Name, s.Clients))
		}
		errs = append(errs, cerr, oerr, rerr)
		out = append(out, in)
	}
	return out, errors.Join(errs...)
}
