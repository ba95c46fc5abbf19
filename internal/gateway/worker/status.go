package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/waystamp/waystamp/internal/gateway"
	"github.com/waystamp/waystamp/internal/model"
)

// Bounds of what a worker has asked of responders of OCSP.
const (
	statusesWaiting = 512     // questions at once
	statusBytes     = 1 << 10 // of one: it is about one certificate
)

// askResponder asks the responder that the clients' setting names, or one of the certificates that their authorities have signed. What it
// answers the worker reads. It returns at once.
func (p *Process) askResponder(q *statusAsk) {
	reply := func(der []byte, err error) {
		a := &statusAnswer{Number: q.Number, DER: der}
		if err != nil {
			a.Error = err.Error()
		}
		p.send(toWorker{Status: a}) // on an error the worker is gone, or is killed
	}
	select {
	case p.statuses <- struct{}{}:
	default:
		reply(nil, fmt.Errorf("%d questions to responders are under way", statusesWaiting))
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
		reply(p.status(ctx, q.StatusQuestion))
	})
}

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
