package api

// These are printed by waystamp get NOUN -o json.

// RefusalsOutput is "get refusals".
type RefusalsOutput struct {
	Version  int       `json:"version"`
	Node     string    `json:"node"`
	Refusals []Refusal `json:"refusals"`
}

// ErrorsOutput is "get errors".
type ErrorsOutput struct {
	Version int    `json:"version"`
	Node    string `json:"node"`
	Errors  Errors `json:"errors"`
}

// PathsOutput is "get paths".
type PathsOutput struct {
	Version int    `json:"version"`
	Node    string `json:"node"`
	Paths   []Path `json:"paths"`
}

// FunctionsOutput is "get functions".
type FunctionsOutput struct {
	Version   int        `json:"version"`
	Node      string     `json:"node"`
	Functions []Function `json:"functions"`
}

// InterfacesOutput is "get interfaces".
type InterfacesOutput struct {
	Version    int         `json:"version"`
	Node       string      `json:"node"`
	Interfaces []Interface `json:"interfaces"`
	Error      string      `json:"error"`
	Problems   []string    `json:"problems"`
	Warnings   []string    `json:"warnings"`
}
