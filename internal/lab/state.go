package lab

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

const stateVersion = 1

// Role is what a member of a lab is.
type Role string

const (
	RoleNode   Role = "node"   // of the domain
	RoleRouter Role = "router" // not of the domain; Linux with its own SRv6
	RoleHost   Role = "host"   // behind an edge interface
	// RoleFunction knows nothing of segment routing, and is behind interfaces of
	// a node. Local functions are no members: they are their node.
	RoleFunction Role = "function"
)

// Member is a node, router, host or function of a lab.
type Member struct {
	Name      string   `json:"name"`
	Role      Role     `json:"role"`
	Namespace string   `json:"namespace"`
	Inode     uint64   `json:"inode"` // of the namespace
	Agent     *Agent   `json:"agent,omitempty"`
	Program   *Program `json:"program,omitempty"`
	Routing   string   `json:"routing,omitempty"` // directory of its FRR, recorded before that is started
}

// Agent is a node's agent: recorded before it is first started, and until the
// node is detached.
type Agent struct {
	Instance string `json:"instance"`
	Plan     string `json:"plan"`
	RunDir   string `json:"run_dir"`
	PID      int    `json:"pid"`   // 0: not running
	Start    uint64 `json:"start"` // of the process, in ticks since the machine's start
}

// Program is the process that is a function of kind raw, or the lab's controller: recorded
// before it is started, and until it is stopped.
type Program struct {
	PID   int    `json:"pid"`   // 0: not known
	Start uint64 `json:"start"` // as of Agent
}

// Owner is a process that takes a lab away before it ends.
type Owner struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // as of Agent
}

// state is lab.json.
type state struct {
	Version int       `json:"version"`
	Prefix  string    `json:"prefix"`
	Created time.Time `json:"created"`
	Up      bool      `json:"up"` // false: half built
	Binary  string    `json:"binary"`
	Files   string    `json:"files,omitempty"` // of gateways
	Owner   *Owner    `json:"owner,omitempty"` // nil: it stays until somebody takes it down
	Members []Member  `json:"members"`
	// Controller is recorded before it is first started; nil: agents follow plan files.
	Controller *Program `json:"controller,omitempty"`
}

func (l *Lab) statePath() string { return filepath.Join(l.dir, "lab.json") }

// update changes the state and its file.
func (l *Lab) update(change func(*state)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(&l.state)
	b, err := json.MarshalIndent(l.state, "", "  ")
	if err == nil {
		err = replaceFile(l.statePath(), append(b, '\n'))
	}
	if err != nil {
		return fmt.Errorf("write the record of lab %s: %w", l.Prefix(), err)
	}
	return nil
}

// updateAgent records what is known of a node's agent.
func (l *Lab) updateAgent(node string, a Agent) error { return l.setAgent(node, &a) }

// forgetAgent records that there is nothing left of a node's agent.
func (l *Lab) forgetAgent(node string) error { return l.setAgent(node, nil) }

// setAgent takes the value that a points to: nobody changes it any more.
func (l *Lab) setAgent(node string, a *Agent) error {
	return l.updateMember(node, func(m *Member) { m.Agent = a })
}

func (l *Lab) updateMember(name string, change func(*Member)) error {
	return l.update(func(s *state) {
		// A new slice: Members has given the old one away.
		s.Members = slices.Clone(s.Members)
		for i := range s.Members {
			if s.Members[i].Name == name {
				change(&s.Members[i])
			}
		}
	})
}

// read takes the state from its file. A lab whose builder ended before it wrote
// one has nothing but its directory.
func (l *Lab) read() error {
	b, err := os.ReadFile(l.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		b, err = fmt.Appendf(nil, `{"version": %d, "prefix": %q}`, stateVersion, l.Prefix()), nil
	}
	var s state
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(b))
		d.DisallowUnknownFields()
		err = d.Decode(&s)
	}
	if err == nil && s.Version != stateVersion {
		err = fmt.Errorf("its version is %d, expect %d", s.Version, stateVersion)
	}
	if err != nil {
		return fmt.Errorf("read the record of lab %s: %w", l.Prefix(), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = s
	return nil
}

// replaceFile writes a file that only root reads, so that a reader sees the old
// or the new content and never a part.
func replaceFile(path string, b []byte) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
