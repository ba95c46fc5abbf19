#!/usr/bin/env bash
# Runs make targets where nothing is but what the README names, so that whatever
# a target wants beyond that, and does not install by itself, is missed: in a
# Debian of its own, made by debootstrap from this machine's apt sources, that
# has make, Go and CA certificates, with a clean clone of HEAD.
#
#   tools/bare-root.sh TARGET...    tools/bare-root.sh demo test
#
# What it shares with this machine is the kernel, the network, Go with its caches,
# and /dev. Mounts and processes are in namespaces of their own, which end with
# it however it ends; the directory below /var/tmp, which a SIGKILL leaves, is
# removed by the next run.
# Ctrl-C and SIGTERM are passed on, and the exit code is that of the target.
# Where debootstrap cannot be had, it says so and runs the targets right here.
set -euo pipefail

# The oldest release that the README promises.
RELEASE=bookworm
PACKAGES=ca-certificates,make

say() { echo "bare-root: $*" >&2; }

fail() {
	say "$@"
	exit 1
}

# job COMMAND ... runs it in a process group of its own, which is told of signals,
# and returns how it ended.
job() {
	local code
	set -m
	"$@" </dev/null &
	job=$!
	set +m
	while :; do
		code=0
		wait "$job" || code=$?
		kill -0 "$job" 2>/dev/null || break # a wait ends with a signal, too
	done
	job=
	return $code
}

# From here to the other line: what runs in the namespaces, as their first process.

# What apt says of where packages come from: a line for each place.
sources() {
	apt-get indextargets --format '$(ORIGIN) $(CODENAME) $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Identifier: Packages' |
		awk -v r=$RELEASE '$1 == "Debian" && ($2 == r || index($2, r "-") == 1) {print $3, $4, $5}' | sort -u
}

# bind_secret FILE WHERE: no copy of it is made, which a SIGKILL would leave.
bind_secret() {
	[ -e "$1" ] || return 0
	if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
	mount --bind -o ro "$1" "$root$2"
}

make_root() {
	local mirror proxy= began=$SECONDS
	mirror=$(sources | awk -v r=$RELEASE '$2 == r {print $1; exit}')
	eval "$(apt-config shell proxy Acquire::http::Proxy)"
	[ -z "$proxy" ] || [ "$proxy" = DIRECT ] || export http_proxy=$proxy
	job debootstrap --variant=minbase --include=$PACKAGES $RELEASE "$root" "$mirror" >"$root.log" 2>&1 || {
		tail -n 20 "$root.log" >&2
		fail "debootstrap failed"
	}
	mkdir "$root/me"
	# The same sources, the same way to them, the same trust.
	sources | sed 's/^/deb /' >"$root/etc/apt/sources.list"
	apt-config dump | grep -E '^Acquire::(https?|Check-[A-Za-z-]+|Retries|ForceIPv[46])\b' >"$root/etc/apt/apt.conf.d/00as-outside" || true
	bind_secret /etc/apt/auth.conf /etc/apt/auth.conf
	bind_secret /etc/apt/auth.conf.d /etc/apt/auth.conf.d
	bind_secret ~/.netrc /me/.netrc
	for f in /usr/local/share/ca-certificates/*.crt; do
		[ ! -f "$f" ] || cp -L "$f" "$root/usr/local/share/ca-certificates/"
	done
	chroot "$root" update-ca-certificates >>"$root.log" 2>&1
	cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
	echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/thrown-away-afterwards"
	say "made Debian $RELEASE with $PACKAGES in $((SECONDS - began)) s: $(du -sm "$root" | cut -f 1) MB"
}

# What the kernel shows of itself. The bpf file system is what make mounts, as the
# README says it does.
mount_kernel() {
	mount -t proc proc "$root/proc"
	mount -t sysfs sysfs "$root/sys"
	mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
	mount --bind /dev "$root/dev"
	mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
	mount -t tmpfs tmpfs "$root/dev/shm"
	mount -t tmpfs -o mode=755 tmpfs "$root/run"
	mkdir "$root/run/lock"
}

mount_go() {
	mkdir -p "$root/usr/local/go" "$root/me/modules" "$root/me/built" "$(go env GOMODCACHE)" "$(go env GOCACHE)"
	mount --bind -o ro "$(go env GOROOT)" "$root/usr/local/go"
	mount --bind "$(go env GOMODCACHE)" "$root/me/modules"
	mount --bind "$(go env GOCACHE)" "$root/me/built"
}

inside() {
	local name environment
	root=$1
	shift
	trap '[ -z "$job" ] || kill -INT -- "-$job"' INT
	trap '[ -z "$job" ] || kill -TERM -- "-$job"' TERM HUP
	# A mount point: ip netns exec wants its root to be one.
	mount --bind "$root" "$root"
	make_root
	git clone -q "$PWD" "$root/src" # clean: without what is not committed
	mount_kernel
	mount_go
	environment=(HOME=/me GOMODCACHE=/me/modules GOCACHE=/me/built LANG=C.UTF-8 TERM="${TERM:-dumb}"
		PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/go/bin)
	for name in GOPROXY GONOPROXY GOPRIVATE GOSUMDB GONOSUMDB GOINSECURE GOFLAGS GOTOOLCHAIN GOAUTH; do
		environment+=("$name=$(go env $name)")
	done
	for name in CI http_proxy https_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
		[ -z "${!name:-}" ] || environment+=("$name=${!name}")
	done
	# Nothing of the machine outside can be seen from here on.
	mkdir "$root/outside"
	cd "$root"
	pivot_root . outside
	cd /src
	umount -l /outside
	rmdir /outside
	for name in "$@"; do
		local began=$SECONDS code=0
		say "make $name"
		job env -i "${environment[@]}" make "$name" || code=$?
		say "make $name took $((SECONDS - began)) s, exit code $code"
		[ $code = 0 ] || exit $code
	done
}

job=
if [ "${1:-}" = --inside ]; then
	shift
	inside "$@"
	exit
fi

# Here it runs outside again.

# here WHY runs the targets without a root of their own.
here() {
	local name
	say "$1: there is no bare root, and what this machine happens to have may hide what is missing"
	for name in "${targets[@]}"; do
		say "make $name"
		make "$name"
	done
	exit
}

[ $# -gt 0 ] || fail "expect the targets of make, such as: demo test"
targets=("$@")
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || fail "making a root needs root"
tools/deps.sh bare || here "debootstrap is not to be had"
[ -n "$(sources | awk -v r=$RELEASE '$2 == r')" ] || apt-get -qq update >&2 || true
[ -n "$(sources | awk -v r=$RELEASE '$2 == r')" ] || here "apt knows no source of Debian $RELEASE"
[ -z "$(git status --porcelain)" ] || say "what is not committed is not in it"

# The namespaces' mounts are not seen out here, and have ended with them; if one
# is here all the same, nothing is removed below it.
remove() {
	local at
	# The last one mounted first.
	awk -v r="$root" '$5 == r || index($5, r "/") == 1 {print $5}' /proc/self/mountinfo | tac | while read -r at; do
		umount "$at" || true
	done
	if grep -qF " $root" /proc/self/mountinfo; then
		say "something is still mounted below $root; it is left there"
		return
	fi
	rm -rf --one-file-system "$root" "$root.log"
}

# pass SIGNAL on to the first process inside, or to what is to become it.
pass() {
	local first
	read -r first _ <"/proc/$child/task/$child/children" || true
	kill -"$1" "${first:-$child}" || true
} 2>/dev/null

# Each run holds a lock on its directory. One without was left by a SIGKILL.
exec 9>/run/lock/waystamp-bare
flock 9
for root in /var/tmp/waystamp-bare.*; do
	[ -d "$root" ] || continue
	exec 8<"$root"
	! flock -n 8 || remove
done
root=$(mktemp -d /var/tmp/waystamp-bare.XXXXXX)
exec 8<"$root"
flock 8
exec 9>&-
chmod 755 "$root"
child=
trap remove EXIT
trap 'pass INT' INT
trap 'pass TERM' TERM HUP
set -m # a Ctrl-C at the terminal comes here alone, and is passed on once
setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child \
	bash tools/bare-root.sh --inside "$root" "${targets[@]}" </dev/null &
child=$!
set +m
while :; do
	code=0
	wait "$child" || code=$?
	kill -0 "$child" 2>/dev/null || break
done
exit $code
