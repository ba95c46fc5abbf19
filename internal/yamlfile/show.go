package yamlfile

// LineMax is how many characters of a line are shown.
const LineMax = 160

// Shorten cuts text to so many characters, and an ellipsis.
func Shorten(most int, s string) string {
	n := 0
	for i := range s {
		if n++; n > most {
			return s[:i] + "…"
		}
	}
	return s
}

// Around cuts a line to LineMax characters around a column, from 0, and says which
// column that is then.
func Around(line string, column int) ([]rune, int) {
	r := []rune(line)
	if len(r) <= LineMax {
		return r, column
	}
	from := max(0, min(column-LineMax/2, len(r)-LineMax))
	to := min(len(r), from+LineMax)
	var out []rune
	if from > 0 {
		out = append(out, '…')
		column++
	}
	out = append(out, r[from:to]...)
	if to < len(r) {
		out = append(out, '…')
	}
	return out, column - from
}
