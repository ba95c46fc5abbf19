package stream

import (
	"sync/atomic"

	"github.com/waystamp/waystamp/internal/host"
	"github.com/waystamp/waystamp/internal/stream/function"
)

// LoopsMax is the largest number of event loops of a worker.
const LoopsMax = 64

// The numbers of one event loop, which alone writes them. The order is between a worker
// and its parent, which are of one program.
const (
	wordRounds     = iota // times that the loop has come round: it is alive as long as this grows
	wordOpened            // connections accepted
	wordRefused           // connections reset at once, because of limits
	wordEnded             // connections that both sides have ended
	wordUnreached         // connections whose server could not be reached, or refused
	wordByClient          // connections reset by the client, or because it was not there any more
	wordByServer          // the same of the server
	wordByFunction        // connections reset by a function
	wordByLimit           // connections reset for being idle or half-closed for too long
	wordByWorker          // connections reset when the worker ended
	wordMismatch          // sealed connections refused: for another part than they came by, or another service
	wordUnsealed          // what came was not sealed
	wordPeer              // the other end was not who it must be, or its bytes were changed on the way
	wordUntrusted         // the other end's certificate was not one of the controller's for an end
	wordExpired           // the other end's certificate was not valid at that time
	wordRevoked           // the other end's certificate is of before its node was revoked
	wordNoKey             // there was no key for them
	wordLoops             // how many loops there are; the first loop's, and no counter
	wordRoom              // connections that there are descriptors for, if these are fewer than the limit allows; the same
	wordBatches           // batches that sealed connections have now; not only this loop's goroutines write it
	wordUnbatched         // reads and writes of sealed connections that found none left
	wordSides             // from here on wordsOfSide for each side
)

const (
	wordIn     = iota // bytes read
	wordOut           // bytes written
	wordSplice        // bytes written without having been copied
	wordsOfSide
)

const (
	wordSteps   = 64 // from here on wordsOfStep for each function of "run", then of "back"
	wordsOfLoop = wordSteps + 2*function.ListMax*wordsOfStep
)

const (
	stepIn    = iota // bytes given to the function
	stepOut          // bytes that came out of it
	stepEvent        // what it is there to find
	wordsOfStep
)

// Bytes are the bytes of one direction.
type Bytes struct {
	In      uint64 `json:"in"`      // read from the sender
	Out     uint64 `json:"out"`     // written to the receiver
	Spliced uint64 `json:"spliced"` // those of Out that were never copied to user space
}

// Step are the bytes of one function of a list.
type Step struct {
	Name   string `json:"name"`
	In     uint64 `json:"in"`
	Out    uint64 `json:"out"`
	Events uint64 `json:"events,omitempty"` // matches of match, refused input of gunzip and open
}

// Statistics are the numbers of a worker since its start.
type Statistics struct {
	Now             uint64   `json:"now"` // connections that are open
	Opened          uint64   `json:"opened"`
	Refused         uint64   `json:"refused"`         // reset at once: limits of connections or descriptors
	Ended           uint64   `json:"ended"`           // in order, by both sides
	Unreached       uint64   `json:"unreached"`       // the server refused, or there was no way to it
	ResetByClient   uint64   `json:"resetByClient"`   // or the client was gone
	ResetByServer   uint64   `json:"resetByServer"`   // or the server was gone
	ResetByFunction uint64   `json:"resetByFunction"` // by a verdict
	ResetByLimit    uint64   `json:"resetByLimit"`    // idle, or half-closed for too long
	ResetByWorker   uint64   `json:"resetByWorker"`   // when it ended
	PartMismatch    uint64   `json:"partMismatch"`    // refused: sealed for another part, or another service
	Unsealed        uint64   `json:"unsealed"`        // refused: not sealed
	Peer            uint64   `json:"peer"`            // refused: by another end than the plan names
	Untrusted       uint64   `json:"untrusted"`       // refused: the other end's certificate was not one of the controller's for an end
	Expired         uint64   `json:"expired"`         // refused: the other end's certificate was not valid at that time
	Revoked         uint64   `json:"revoked"`         // refused: the other end\'s certificate is of before its node was revoked
	NoKey           uint64   `json:"noKey"`           // refused: there was no key for the part
	Batches         uint64   `json:"batches"`         // that sealed connections have now, of 64 KiB each
	Unbatched       uint64   `json:"unbatched"`       // reads and writes of sealed connections for which none was left
	ToServer        Bytes    `json:"toServer"`
	ToClient        Bytes    `json:"toClient"`
	Run             []Step   `json:"run"`
	Back            []Step   `json:"back"`
	Room            uint64   `json:"room"`   // connections that the process has descriptors for; 0: as many as its limit allows
	Rounds          []uint64 `json:"rounds"` // of each loop; a loop that hangs stands still
}

// NewStatistics makes the memory that a worker writes its statistics to. The parent
// keeps it, and hands its file to the worker.
func NewStatistics() (*host.SharedWords, error) {
	return host.NewSharedWords("waystamp-worker", LoopsMax*wordsOfLoop)
}

// ReadStatistics adds up what the loops of a worker have written. The numbers are the
// worker's word: a worker that has been taken over may write any.
func ReadStatistics(memory *host.SharedWords, c *Config) Statistics {
	s := Statistics{Room: loopWords(memory, 0)[wordRoom].Load()}
	for _, e := range c.Run {
		s.Run = append(s.Run, Step{Name: e.Name})
	}
	for _, e := range c.Back {
		s.Back = append(s.Back, Step{Name: e.Name})
	}
	// A worker chooses how many loops it has, by its CPUs.
	for i := range max(1, min(loopWords(memory, 0)[wordLoops].Load(), LoopsMax)) {
		w := loopWords(memory, i)
		s.Rounds = append(s.Rounds, w[wordRounds].Load())
		// What ends a connection is read before what opens it, so that Now never wraps.
		s.Ended += w[wordEnded].Load()
		s.Unreached += w[wordUnreached].Load()
		s.ResetByClient += w[wordByClient].Load()
		s.ResetByServer += w[wordByServer].Load()
		s.ResetByFunction += w[wordByFunction].Load()
		s.ResetByLimit += w[wordByLimit].Load()
		s.ResetByWorker += w[wordByWorker].Load()
		s.PartMismatch += w[wordMismatch].Load()
		s.Unsealed += w[wordUnsealed].Load()
		s.Peer += w[wordPeer].Load()
		s.Untrusted += w[wordUntrusted].Load()
		s.Expired += w[wordExpired].Load()
		s.Revoked += w[wordRevoked].Load()
		s.NoKey += w[wordNoKey].Load()
		s.Batches += w[wordBatches].Load()
		s.Unbatched += w[wordUnbatched].Load()
		s.Refused += w[wordRefused].Load()
		s.Opened += w[wordOpened].Load()
		for side, b := range []*Bytes{&s.ToServer, &s.ToClient} {
			of := w[wordSides+side*wordsOfSide:]
			b.In += of[wordIn].Load()
			b.Out += of[wordOut].Load()
			b.Spliced += of[wordSplice].Load()
		}
		for side, steps := range [][]Step{s.Run, s.Back} {
			for j := range min(len(steps), function.ListMax) {
				of := stepWords(w, function.Side(side), j)
				steps[j].In += of[stepIn].Load()
				steps[j].Out += of[stepOut].Load()
				steps[j].Events += of[stepEvent].Load()
			}
		}
	}
	closed := s.Ended + s.Unreached + s.ResetByClient + s.ResetByServer + s.ResetByFunction + s.ResetByLimit + s.ResetByWorker +
		s.PartMismatch + s.Unsealed + s.Peer + s.Untrusted + s.Expired + s.Revoked + s.NoKey
	s.Now = s.Opened - min(closed, s.Opened)
	return s
}

func loopWords[N int | uint64](memory *host.SharedWords, i N) []atomic.Uint64 {
	return memory.Words[i*wordsOfLoop : (i+1)*wordsOfLoop]
}

func stepWords(loop []atomic.Uint64, side function.Side, i int) []atomic.Uint64 {
	at := wordSteps + (int(side)*function.ListMax+i)*wordsOfStep
	return loop[at : at+wordsOfStep]
}
