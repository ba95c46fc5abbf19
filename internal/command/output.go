package command

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
)

// WriteJSON writes a result on one line.
func WriteJSON(out io.Writer, v any) error { return json.NewEncoder(out).Encode(v) }

// WriteTable aligns columns: those of numbers to the right.
func WriteTable(out io.Writer, rows func(row func(...any))) error {
	var cells [][]string
	var numbers []bool
	rows(func(values ...any) {
		var line []string
		for i, v := range values {
			if i == len(numbers) {
				numbers = append(numbers, false)
			}
			if n, ok := v.(uint64); ok {
				numbers[i] = true
				line = append(line, strconv.FormatUint(n, 10))
				continue
			}
			line = append(line, fmt.Sprint(v))
		}
		cells = append(cells, line)
	})
	widths := make([]int, len(numbers))
	for _, line := range cells {
		for i, c := range line {
			widths[i] = max(widths[i], len(c))
		}
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, line := range cells {
		for i, c := range line {
			if numbers[i] {
				c = fmt.Sprintf("%*s", widths[i], c)
			}
			sep := "\t"
			if i == len(line)-1 {
				sep = "\n"
			}
			fmt.Fprint(w, c+sep)
		}
	}
	return w.Flush()
}

// OrDash is what a table shows for s.
func OrDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
