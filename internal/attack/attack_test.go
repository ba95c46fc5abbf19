package attack

import (
	"strings"
	"testing"

	"github.com/waystamp/waystamp/internal/model"
)

// Whatever is otherwise than it must be is a problem.
func TestAnotherOutcomeIsWrong(t *testing.T) {
	want := refused("r6", "proof", "never stamped")
	for name, c := range map[string]struct {
		want, got outcome
		explained string
		more      int
		differ    string
		problem   string // "": it is as it must be
	}{
		"as it must be":    {want: want, got: refused("r6", "proof", ""), explained: "r2 never stamped this packet"},
		"not detected":     {want: delivered(), got: delivered()},
		"delivered":        {want: want, got: delivered(), problem: "delivered, want it refused at r6: proof"},
		"refused":          {want: delivered(), got: refused("r6", "proof", ""), explained: "no", problem: "refused at r6: proof, want it delivered"},
		"another reason":   {want: want, got: refused("r6", "segments", ""), explained: "never stamped", problem: "refused at r6: segments"},
		"another node":     {want: want, got: refused("r3", "proof", ""), explained: "never stamped", problem: "refused at r3: proof"},
		"not explained":    {want: want, got: refused("r6", "proof", ""), explained: "nothing", problem: "does not say \"never stamped\""},
		"nothing expected": {want: refused("r6", "proof", ""), got: refused("r6", "proof", ""), explained: "never stamped", problem: "nothing is said"},
		"one more":         {want: want, got: refused("r6", "proof", ""), explained: "never stamped", more: 1, problem: "+1 packets"},
		"others refused":   {want: delivered(), got: delivered(), differ: "r6 refused 2", problem: "r6 refused 2"},
	} {
		r := Result{Explained: c.explained}
		r.judge(c.want, c.got, c.more, c.differ)
		if r.OK != (c.problem == "") || !strings.Contains(r.Problem, c.problem) {
			t.Errorf("%s: OK %t, problem %q; want %q", name, r.OK, r.Problem, c.problem)
		}
	}
}

// Each attack has a name of its own, and every refusal of it a sentence.
func TestEveryAttackIsWhole(t *testing.T) {
	names := map[string]bool{}
	for _, a := range attacks() {
		if a.Name == "" || a.What == "" || a.Where == "" || names[a.Name] || strings.Contains(a.What+a.Where, "|") {
			t.Errorf("attack %+v", a.Attack)
		}
		names[a.Name] = true
		for _, s := range []model.Scheme{model.SchemePoT, model.SchemeOPoT, model.SchemeKeyed, model.SchemeKeyedFlow} {
			if o := a.expect(s); (o.reason == "") != (o.node == "") || (o.reason == "") != (o.says == "") {
				t.Errorf("%s on %s: %+v", a.Name, s, o)
			}
		}
	}
}

func TestTheTableHasARowForEachAttackThatWasMounted(t *testing.T) {
	got := Table([]Result{
		{Attack: "replay", Scheme: "pot", Observed: NotDetected}, {Attack: "skip-hop", Scheme: "pot", Observed: "refused: proof"},
		{Attack: "replay", Scheme: "keyed", Observed: "refused: replay"}, {Attack: "skip-hop", Scheme: "keyed", Observed: "refused: proof"},
	})
	lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
	if len(lines) != 4 || lines[0] != "| attack | what | mounted by | pot | keyed |" || lines[1] != "|---|---|---|---|---|" ||
		!strings.HasPrefix(lines[2], "| skip-hop |") || !strings.HasSuffix(lines[2], "| `proof` | `proof` |") ||
		!strings.HasPrefix(lines[3], "| replay |") || !strings.HasSuffix(lines[3], "| **not detected** | `replay` |") {
		t.Errorf("the table is\n%s", got)
	}
}
