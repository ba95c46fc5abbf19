package command

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/waystamp/waystamp/internal/yamlfile"
)

// WriteJSON writes a result on one line.
func WriteJSON(out io.Writer, v any) error { return json.NewEncoder(out).Encode(v) }

// OutputFlag adds -o, whose values a shell completes; the first is the default.
func OutputFlag(cmd *cobra.Command, into *string, formats ...string) {
	last := len(formats) - 1
	cmd.Flags().StringVarP(into, "output", "o", formats[0], "`format` of the result: "+strings.Join(formats[:last], ", ")+" or "+formats[last])
	if err := cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // the flag was added above
	}
}

// CheckOutput refuses a value of -o that is none of the formats.
func CheckOutput(output string, formats ...string) error {
	if slices.Contains(formats, output) {
		return nil
	}
	last := len(formats) - 1
	return Usagef("--output is %q; expect %s or %s", output, strings.Join(formats[:last], ", "), formats[last])
}

// WriteOutput writes a result as json, on one line, or as a document of yaml.
func WriteOutput(out io.Writer, format string, v any) error {
	if format == "json" {
		return WriteJSON(out, v)
	}
	b, err := json.Marshal(v)
	if err == nil {
		b, err = yamlfile.FromJSON(b)
	}
	if err == nil {
		_, err = fmt.Fprintf(out, "---\n%s", b)
	}
	return err
}

// Number is a cell of a table that is aligned as a number.
type Number string

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
			if _, ok := v.(Number); ok {
				numbers[i] = true
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
