package yamlfile

import "github.com/goccy/go-yaml"

// FromJSON gives a JSON value as YAML, with the fields in their order.
func FromJSON(b []byte) ([]byte, error) { return yaml.JSONToYAML(b) }
