package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"
)

const (
	// auditMax is how large the file grows before it is put aside, auditKept how many such are kept.
	auditMax  = 16 << 20
	auditKept = 4
)

// Audit is the file of calls, a JSON object per line. It holds no secret, and is its owner's alone.
type Audit struct {
	path string
	max  int64

	mu   sync.Mutex
	file *os.File
	size int64
}

// auditLine is one call.
type auditLine struct {
	Time   time.Time `json:"time"`
	Who    string    `json:"who"`
	From   string    `json:"from,omitempty"`
	Via    string    `json:"via,omitempty"` // the controller that passed it on
	Call   string    `json:"call"`
	About  string    `json:"about,omitempty"`
	Result string    `json:"result"`
}

// OpenAudit opens the file, and makes it if it is not there; what is in it stays.
func OpenAudit(path string) (*Audit, error) {
	a := &Audit{path: path, max: auditMax}
	return a, a.open()
}

func (a *Audit) open() error {
	f, err := os.OpenFile(a.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the audit file: %w", err)
	}
	info, err := f.Stat()
	if err == nil && info.Mode().Perm()&0o022 != 0 {
		err = fmt.Errorf("it has mode %04o, and others can change it; try: chmod 600 %s", info.Mode().Perm(), a.path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("open the audit file: %w", err), f.Close())
	}
	a.file, a.size = f, info.Size()
	return nil
}

// Close closes the file; nothing is written any more.
func (a *Audit) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		return nil
	}
	err := a.file.Close()
	a.file = nil
	return err
}

// write adds a line.
func (a *Audit) write(l auditLine) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	b = append(b, '\n')
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		if err := a.open(); err != nil {
			return err
		}
	}
	if a.size > 0 && a.size+int64(len(b)) > a.max {
		if err := a.rotate(); err != nil {
			return err
		}
	}
	n, err := a.file.Write(b)
	a.size += int64(n)
	return err
}

// rotate puts the file aside, and forgets the oldest.
func (a *Audit) rotate() error {
	err := a.file.Close()
	a.file = nil
	for i := auditKept - 1; i >= 0 && err == nil; i-- {
		from := a.path
		if i > 0 {
			from = fmt.Sprint(a.path, ".", i)
		}
		if err = os.Rename(from, fmt.Sprint(a.path, ".", i+1)); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	return errors.Join(err, a.open())
}

// note writes a line of the audit trail: to the log, and to the file if somebody has to answer for it.
func (c *Controller) note(l auditLine, toFile bool) {
	l.Time = c.cfg.Now()
	line := []any{"who", l.Who, "from", l.From, "call", l.Call, "about", l.About, "result", l.Result}
	if l.Via != "" {
		line = append(line, "via", l.Via)
	}
	c.cfg.Log.Info("audit", line...)
	if c.cfg.Audit == nil || !toFile {
		return
	}
	if err := c.cfg.Audit.write(l); err != nil {
		c.cfg.Log.Error("a call is not in the audit file", "err", err)
	}
}
