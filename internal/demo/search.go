package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/lab"
)

// search looks for words in all frames that come in by interfaces.
type search struct {
	words []string
	ports []*host.Frames
	ended []chan error // of each port's reader

	mu     sync.Mutex
	frames int
	hits   [2]int            // by word
	places map[string][2]int // the same, by where frames came in: member and interface
}

// frameMax is the length in bytes of the longest frame that is looked at: a super-packet.
const frameMax = 64<<10 + 256

// everywhere searches all interfaces of all members of a lab.
func (s *search) everywhere(l *lab.Lab) error {
	for _, m := range l.Members() {
		if err := s.member(l, m.Name); err != nil {
			return fmt.Errorf("search what comes to %s: %w", m.Name, err)
		}
	}
	return nil
}

func (s *search) member(l *lab.Lab, name string) error {
	n, err := l.Net(name)
	if err != nil {
		return err
	}
	defer n.Close()
	links, err := n.Links()
	if err != nil {
		return err
	}
	ns, err := l.NetNS(name)
	if err != nil {
		return err
	}
	defer ns.Close()
	for _, link := range links {
		if link.Name == "lo" {
			continue
		}
		p, err := host.OpenFrames(ns, link.Name, unix.ETH_P_ALL)
		if err != nil {
			return err
		}
		ended := make(chan error, 1)
		s.ports, s.ended = append(s.ports, p), append(s.ended, ended)
		go func() {
			ended <- p.Receive(make([]byte, frameMax), func(frame []byte) { s.look(name+" "+link.Name, frame) })
		}()
	}
	return nil
}

func (s *search) look(at string, frame []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frames++
	for i, w := range s.words {
		if bytes.Contains(frame, []byte(w)) {
			s.hits[i]++
			if s.places == nil {
				s.places = map[string][2]int{}
			}
			here := s.places[at]
			here[i]++
			s.places[at] = here
		}
	}
}

// found is how many frames were looked at until now, and how many have each word.
func (s *search) found(ctx context.Context) (frames int, hits [2]int, err error) {
	for _, p := range s.ports {
		dropped, err := p.CaughtUp(ctx)
		if err != nil {
			return 0, hits, err
		}
		if dropped > 0 {
			return 0, hits, fmt.Errorf("%d frames were too many for the search", dropped)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.frames, s.hits, nil
}

// where is at which members and interfaces frames have a word, in alphabetical order.
func (s *search) where(word int) (at []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for place, n := range s.places {
		if n[word] > 0 {
			at = append(at, place)
		}
	}
	slices.Sort(at)
	return at
}

func (s *search) close() (err error) {
	for i, p := range s.ports {
		err = errors.Join(err, p.Close(), <-s.ended[i])
	}
	return err
}
