package metrics

import (
	"strings"
	"testing"
)

var table = Table{
	{"a_total", Counter, []string{"by"}, "Things with a \\ and\na line."},
	{"b_seconds", Gauge, nil, "A time."},
	{"c_seconds", Summary, []string{"x", "y"}, "Times."},
	{"d", Gauge, nil, "Never set."},
}

func TestNumbersAreWrittenInTheTextFormat(t *testing.T) {
	lasting, now := NewSet(table), NewSet(table)
	lasting.Add("a_total", 2, "r2")
	lasting.Add("a_total", 1, "a \"quoted\"\nname\\")
	lasting.Add("a_total", 0, "r1")
	lasting.Add("a_total", 3, "r2")
	lasting.Set("b_seconds", 1)
	now.Set("b_seconds", 0.25)
	lasting.Observe("c_seconds", 0.5, "1", "2")
	lasting.Observe("c_seconds", 1, "1", "2")
	var b strings.Builder
	if err := Write(&b, table, lasting, now); err != nil {
		t.Fatal(err)
	}
	const want = `# HELP a_total Things with a \\ and\na line.
# TYPE a_total counter
a_total{by="a \"quoted\"\nname\\"} 1
a_total{by="r1"} 0
a_total{by="r2"} 5
# HELP b_seconds A time.
# TYPE b_seconds gauge
b_seconds 0.25
# HELP c_seconds Times.
# TYPE c_seconds summary
c_seconds_sum{x="1",y="2"} 1.5
c_seconds_count{x="1",y="2"} 2
`
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}

func TestWhatIsInNoTableIsAMistake(t *testing.T) {
	for name, f := range map[string]func(s *Set){
		"an unknown name": func(s *Set) { s.Add("x_total", 1) },
		"another type":    func(s *Set) { s.Set("a_total", 1, "r1") },
		"other labels":    func(s *Set) { s.Add("a_total", 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s is taken", name)
				}
			}()
			f(NewSet(table))
		}()
	}
}
