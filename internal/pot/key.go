package pot

import "errors"

var errKeyMarshal = errors.New("a key is not written by accident")
