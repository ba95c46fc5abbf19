package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/waystamp/waystamp/internal/await"
	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/plan"
	"github.com/waystamp/waystamp/internal/routing"
)

// frrDirs is where distributions put FRR's daemons.
var frrDirs = []string{"/usr/lib/frr", "/usr/libexec/frr", "/usr/local/lib/frr"}

// frrRunDir has a directory of sockets for each lab, and in it one for each station.
// It is not in the lab's own, which is root's: the daemons run as user frr.
const frrRunDir = "/run/waystamp-frr"

// convergeTime is how long BGP may take to lead everywhere.
const convergeTime = 2 * time.Minute

// zebraSocket is where bgpd finds zebra, in a station's directory.
const zebraSocket = "zserv.api"

// The daemons of a station, in the order that they are started in.
var frrDaemons = []string{"zebra", "bgpd"}

// ErrNoFRR means that FRR is not installed.
var ErrNoFRR = errors.New("there is no zebra and bgpd of FRR; install the package frr, or leave routing: frr out of the lab section")

// requireFRR checks that FRR can be run at all.
func requireFRR(dirs []string) error {
	for _, d := range frrDaemons {
		if frrProgram(dirs, d) == "" {
			return ErrNoFRR
		}
	}
	if _, err := user.Lookup("frr"); err != nil {
		return fmt.Errorf("%w (%w)", ErrNoFRR, err)
	}
	return nil
}

func frrProgram(dirs []string, name string) string {
	for _, dir := range dirs {
		if st, err := os.Stat(filepath.Join(dir, name)); err == nil && st.Mode().IsRegular() {
			return filepath.Join(dir, name)
		}
	}
	return ""
}

// startRouting runs FRR at each station that has a speaker, and waits until all have
// learned their routes. Without such stations it does nothing.
func (l *Lab) startRouting(ctx context.Context, w layout, d model.Domain, paths []plan.Path) error {
	ctx, cancel := context.WithTimeoutCause(ctx, await.Limit(convergeTime), fmt.Errorf("BGP has not led everywhere after %s", await.Limit(convergeTime)))
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range w.stations {
		if s.speaker == nil {
			continue
		}
		speaker := *s.speaker
		if s.role == RoleNode {
			node, err := routing.New(d, paths, s.name)
			if err != nil {
				return err
			}
			speaker.SIDs, speaker.Metric = node.SIDs, node.Metric
		}
		g.Go(func() error {
			if err := l.startFRR(ctx, speaker, s.learned); err != nil {
				return fmt.Errorf("start FRR of %s: %w", s.name, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// startFRR runs the daemons of one station. They outlive ctx and the process.
func (l *Lab) startFRR(ctx context.Context, s routing.Speaker, learned []netip.Prefix) error {
	m, err := l.Member(s.Name)
	if err != nil {
		return err
	}
	dir := filepath.Join(frrRunDir, l.Prefix(), s.Name)
	if err := l.updateMember(s.Name, func(m *Member) { m.Routing = dir }); err != nil {
		return err
	}
	if err := makeFRRDir(dir); err != nil {
		return err
	}
	ns, err := m.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	ended := errors.New("a daemon has ended")
	waiting, end := context.WithCancelCause(ctx)
	defer end(nil)
	for _, name := range frrDaemons {
		text := s.BGP()
		if name == "zebra" {
			text = s.Zebra()
		}
		conf := filepath.Join(dir, name+".conf")
		if err := os.WriteFile(conf, []byte(text), 0o644); err != nil { // the daemon's user reads it
			return err
		}
		log, err := os.Create(filepath.Join(l.dir, "logs", s.Name+"."+name+".log"))
		if err != nil {
			return err
		}
		args := []string{
			"--vty_socket", dir, "-f", conf, "-i", filepath.Join(dir, name+".pid"), "-z", filepath.Join(dir, zebraSocket), "-P", "0", "--log", "stdout",
		}
		if name == "bgpd" {
			args = append(args, "-l", "::") // link-local neighbours connect there
		}
		cmd := host.Command(context.WithoutCancel(ctx), ns, frrProgram(frrDirs, name), args...)
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C here is not meant for it
		err = cmd.Start()
		log.Close()
		if err != nil {
			return err
		}
		go func() { // ends with the daemon
			status := cmd.Wait()
			said, _ := os.ReadFile(log.Name())
			end(fmt.Errorf("%w: %s: %w: %s", ended, name, endStatus(status), lastLines(said, 5)))
		}()
		if name == "zebra" {
			// A bgpd that does not find it tries again after 10 s.
			if err := waitForSocket(waiting, filepath.Join(dir, zebraSocket)); err != nil {
				return err
			}
		}
	}
	n, err := host.Open(ns)
	if err != nil {
		return err
	}
	defer n.Close()
	missing := learned
	all := errors.New("all are there")
	err = n.Watch(waiting, host.ChangeRoutes, func() error {
		routes, err := n.Routes(host.ProtocolBGP)
		if err != nil {
			return err
		}
		missing = slices.DeleteFunc(slices.Clone(learned), func(p netip.Prefix) bool {
			return slices.ContainsFunc(routes, func(r host.Route) bool { return r.Destination == p })
		})
		if len(missing) == 0 {
			return all
		}
		return nil
	})
	if errors.Is(err, all) {
		return nil
	}
	if len(missing) > 0 {
		err = fmt.Errorf("it has not learned %s: %w", missing[0], err)
	}
	return err
}

// waitForSocket waits until somebody listens at a path.
func waitForSocket(ctx context.Context, path string) error {
	for {
		c, err := net.Dial("unix", path)
		if err == nil {
			return c.Close()
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%w)", context.Cause(ctx), err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func endStatus(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// makeFRRDir makes a directory that user frr may write to.
func makeFRRDir(dir string) error {
	u, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory of FRR's sockets: %w", err)
	}
	return os.Chown(dir, uid, gid)
}

// stopRouting ends a station's FRR, and takes its sockets away. One that does not run
// is no error.
func (l *Lab) stopRouting(ctx context.Context, m Member) error {
	if m.Routing == "" {
		return nil
	}
	if err := stopWithArguments(ctx, m.Inode, "--vty_socket", m.Routing); err != nil {
		return fmt.Errorf("stop FRR of %s: %w", m.Name, err)
	}
	// The record is a file that somebody may have changed.
	if !strings.HasPrefix(filepath.Clean(m.Routing), frrRunDir+"/") {
		return fmt.Errorf("the record of %s says that %s is the directory of its FRR, which is not below %s", m.Name, m.Routing, frrRunDir)
	}
	if err := os.RemoveAll(m.Routing); err != nil {
		return fmt.Errorf("remove the directory of FRR's sockets: %w", err)
	}
	// The lab's goes with the last one.
	if err := os.Remove(filepath.Dir(m.Routing)); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTEMPTY) {
		return fmt.Errorf("remove the directory of FRR's sockets: %w", err)
	}
	return l.updateMember(m.Name, func(m *Member) { m.Routing = "" })
}
