//go:build !amd64 && !arm64

package sandbox

const auditArch = 0 // there is no filter

var ofThisMachine []uint32
