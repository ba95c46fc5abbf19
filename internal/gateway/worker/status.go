package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
	"github.com/waystamp/waystamp/internal/signer"
)

// Bounds of what a worker has asked of responders of OCSP, and of signers.
const (
	statusesWaiting = 512     // questions at once
	statusBytes     = 1 << 10 // of one to a responder: it is about one certificate
)

// get gets something for the worker from another process, and hands it over unread. It returns at once.
func (p *Process) get(number uint64, from func(context.Context) ([]byte, error)) {
	reply := func(der []byte, err error) {
		a := &statusAnswer{Number: number, DER: der}
		if err != nil {
			a.Error = err.Error()
			if e, ok := errors.AsType[*signer.Error](err); ok {
				a.Why = e.Why
			}
		}
		p.send(toWorker{Status: a}) // on an error the worker is gone, or is killed
	}
	select {
	case p.statuses <- struct{}{}:
	default:
		reply(nil, fmt.Errorf("%d questions to responders and signers are under way", statusesWaiting))
		return
	}
	p.wait.Go(func() {
		defer func() { <-p.statuses }()
		ctx, stop := context.WithCancel(context.Background())
		defer stop()
		go func() {
			select {
			case <-p.ended:
				stop()
			case <-p.stop:
				stop()
			case <-ctx.Done():
			}
		}()
		reply(from(ctx))
	})
}

// status asks the responder that the clients' setting names, or one of the certificates that their authorities have signed.
func (p *Process) status(ctx context.Context, q gateway.StatusQuestion) ([]byte, error) {
	if len(q.Request) > statusBytes {
		return nil, fmt.Errorf("the question has %d bytes; at most %d are sent", len(q.Request), statusBytes)
	}
	p.mu.Lock()
	clients := p.now.Clients
	p.mu.Unlock()
	i := slices.IndexFunc(clients, func(c model.Clients) bool { return c.Name == q.Clients })
	if i < 0 {
		return nil, errors.New("there are no such clients")
	}
	url, err := gateway.ResponderOf(clients[i], gateway.Folder(p.options.Folder), q.Certificates, time.Now())
	if err != nil {
		return nil, err
	}
	return p.responders.Ask(ctx, url, q.Request)
}

// signed asks the signer of a service, which signs handshakes alone; this process holds the worker to that, too.
func (p *Process) signed(ctx context.Context, q *signAsk) ([]byte, error) {
	if err := signer.CheckMessage(q.Message); err != nil {
		return nil, err
	}
	p.mu.Lock()
	services := p.now.Services
	p.mu.Unlock()
	i := slices.IndexFunc(services, func(s model.Service) bool { return s.Name == q.Service && s.Signer != "" })
	if i < 0 {
		return nil, errors.New("there is no such service with a signer")
	}
	return signer.Ask(ctx, services[i].Signer, q.Service, q.Algorithm, q.Message)
}
