package planfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Of a POSIX access control list as the kernel stores it (posix_acl_xattr_header in uapi/linux/posix_acl_xattr.h): a version in four bytes, and then entries
// of eight, little endian: tag, permissions and id.
const (
	aclName    = "system.posix_acl_access"
	aclVersion = 2
	aclMax     = 64 << 10 // XATTR_SIZE_MAX

	aclUserOwner  = 0x01
	aclUser       = 0x02
	aclGroupOwner = 0x04
	aclGroup      = 0x08
	aclMask       = 0x10
	aclOther      = 0x20
)

// othersByACL tells whether other users than root and me can use a file whose mode has permissions beyond its owner's, and which. A file with an access control list
// shows its mask where others show the group's permissions: systemd makes credentials for a unit with User= root's, and lets the unit's user read
// them by such a list, so that they have mode 0440.
func othersByACL(f *os.File, mode, me uint32) (can bool, which string, err error) {
	if mode&0o007 != 0 {
		return true, "", nil
	}
	b := make([]byte, aclMax)
	n, err := unix.Fgetxattr(int(f.Fd()), aclName, b)
	switch {
	case errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP):
		return true, "", nil // the group's permissions are what they seem
	case err != nil:
		return true, "", fmt.Errorf("read its access control list: %w", err)
	}
	which, err = othersInACL(b[:n], me)
	return which != "", which, err
}

// othersInACL tells which others a list lets use its file; "": none.
func othersInACL(acl []byte, me uint32) (string, error) {
	if len(acl) < 4 || len(acl)%8 != 4 || binary.LittleEndian.Uint32(acl) != aclVersion {
		return "", errors.New("its access control list has a form that this program does not know")
	}
	type entry struct {
		tag, permissions uint16
		id               uint32
	}
	var entries []entry
	mask := uint16(7)
	for at := acl[4:]; len(at) > 0; at = at[8:] {
		e := entry{binary.LittleEndian.Uint16(at), binary.LittleEndian.Uint16(at[2:]), binary.LittleEndian.Uint32(at[4:])}
		if e.tag == aclMask {
			mask = e.permissions
		}
		entries = append(entries, e)
	}
	for _, e := range entries {
		switch e.tag {
		case aclUserOwner, aclMask: // check has looked at the owner
			continue
		case aclUser:
			if e.id != 0 && e.id != me && e.permissions&mask != 0 {
				return fmt.Sprintf(", and its access control list lets user %d use it", e.id), nil
			}
		case aclGroupOwner, aclGroup:
			if e.permissions&mask != 0 {
				return ", and its access control list lets a group use it", nil
			}
		case aclOther:
			if e.permissions != 0 {
				return ", and its access control list lets everybody use it", nil
			}
		default:
			return "", fmt.Errorf("its access control list has an entry with tag %#x, which this program does not know", e.tag)
		}
	}
	return "", nil
}
