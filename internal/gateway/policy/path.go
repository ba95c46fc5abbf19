package policy

import (
	"errors"
	"net/url"
	"strings"
	"unicode/utf8"
)

// pathMax is the length in bytes of the longest path that is decided about.
const pathMax = 8192

// Clean decodes the path of a request once, and removes dot segments (RFC 3986 section
// 5.2.4). It refuses what an origin could read in another way than this gateway: encoded
// slashes, backslashes, NUL and other control characters, what would decode again, empty
// segments, and path parameters (RFC 3986 section 3.3), which servlet containers take out.
func Clean(raw string) (string, error) {
	if len(raw) > pathMax {
		return "", errors.New("is too long")
	}
	if !strings.HasPrefix(raw, "/") {
		return "", errors.New("does not begin with a slash")
	}
	// An encoded slash does not separate segments, and many decode it before they split.
	if strings.Contains(strings.ToLower(raw), "%2f") {
		return "", errors.New("has an encoded slash")
	}
	path, err := url.PathUnescape(raw)
	if err != nil {
		return "", errors.New("has a percent sign that begins no encoded byte")
	}
	switch {
	case !utf8.ValidString(path):
		return "", errors.New("is not UTF-8")
	case strings.ContainsFunc(path, func(c rune) bool { return c < ' ' || c == 0x7f }):
		return "", errors.New("has a control character")
	case strings.ContainsAny(path, `\`):
		return "", errors.New("has a backslash")
	case strings.Contains(path, ";"):
		return "", errors.New("has a semicolon: path parameters are not decided about")
	case decodesAgain(path):
		return "", errors.New("is encoded twice")
	case strings.Contains(path, "//"):
		return "", errors.New("has an empty segment")
	}
	var out []string
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		if s != "." && s != ".." {
			out = append(out, s)
			continue
		}
		if s == ".." {
			if len(out) == 0 {
				return "", errors.New("leads above the root")
			}
			out = out[:len(out)-1]
		}
		if i == len(segments)-1 {
			out = append(out, "") // what a dot segment at the end leaves is a folder
		}
	}
	return "/" + strings.Join(out, "/"), nil
}

func decodesAgain(s string) bool {
	hex := func(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F' }
	for i := 0; i+2 < len(s); i++ {
		if s[i] == '%' && hex(s[i+1]) && hex(s[i+2]) {
			return true
		}
	}
	return false
}
