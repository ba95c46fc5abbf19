package await

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"
)

// PatienceVariable names the environment variable that multiplies all deadlines of tests and of labs. An emulated
// machine is many times slower than the hardware that they are made for.
const PatienceVariable = "WAYSTAMP_PATIENCE"

// patienceMost keeps the longest deadline below the time of a whole run.
const patienceMost = 100

var patience = sync.OnceValues(func() (float64, error) { return parsePatience(os.Getenv(PatienceVariable)) })

func parsePatience(text string) (float64, error) {
	if text == "" {
		return 1, nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !(f >= 1 && f <= patienceMost) {
		return 1, fmt.Errorf("%s is %q; set it to a number from 1 to %d, by which deadlines are multiplied, or unset it", PatienceVariable, text, patienceMost)
	}
	return f, nil
}

// Patience is the factor that the environment sets, 1 where it sets none. Labs and tests ask before
// they begin, so that a bad value is an error.
func Patience() (float64, error) { return patience() }

// Limit is the time to wait for an event that takes less than d on hardware.
func Limit(d time.Duration) time.Duration {
	f, _ := patience() // whoever begins has asked for the error
	return scaled(d, f)
}

func scaled(d time.Duration, factor float64) time.Duration {
	return time.Duration(float64(d) * factor)
}
