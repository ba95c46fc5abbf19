package agent

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/waystamp/waystamp/internal/await"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for what must come; nothing waits that long when all is well.
var patience = await.Limit(2 * time.Minute)
