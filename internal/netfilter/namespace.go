package netfilter

// Interfaces inside a namespace that belongs to a function: packets come in by one,
// and leave by the other.
const (
	InsideIn  = "waystamp-in"
	InsideOut = "waystamp-out"
)
