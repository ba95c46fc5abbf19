package sandbox

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

// ofThisMachine are calls that newer machines do not have.
var ofThisMachine = []uint32{unix.SYS_EPOLL_WAIT}
