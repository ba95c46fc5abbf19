package agent

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for what must come; nothing waits that long when all is well.
const patience = 2 * time.Minute
