#!/usr/bin/env bash
# Gives this machine what a make target needs and it lacks: programs, through
# apt, and the bpf file system. Says what it does, and nothing if there is
# nothing to do. Safe to run beside itself.
#
#   tools/deps.sh run      for bin/waystamp and its tests: the bpf file system, and what demo and tutorial call
#   tools/deps.sh test     for the tests alone: a load for those of the bench and a proxy to hold ours against, two decoders of others, FRR, etcd, clients of TLS, what reads units, and programs to put chains before
#   tools/deps.sh bare     for tools/bare-root.sh: debootstrap
#   tools/deps.sh kernels  for make test-kernels: qemu, and what its machines run
#   tools/deps.sh arm64    for make check-arm: qemu for that architecture
#   tools/deps.sh clang    for make generate and make check: the pinned compiler
set -euo pipefail

fail() {
	echo "deps: $*" >&2
	exit 1
}

need_root() {
	[ "$(id -u)" = 0 ] || fail "$1 needs root; run make as root"
}

# One at a time: apt takes a lock of its own, but two that mount the bpf file
# system would hide each other's pins.
locked() {
	exec 9>/run/lock/waystamp-deps
	flock 9
}

# install PROGRAM=PACKAGE ...
install() {
	local pair missing=()
	for pair in "$@"; do
		command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	need_root "installing ${missing[*]}"
	command -v apt-get >/dev/null ||
		fail "this machine lacks ${missing[*]} and has no apt-get; install them by hand"
	locked
	echo "deps: installing ${missing[*]} with apt-get" >&2
	export DEBIAN_FRONTEND=noninteractive
	local apt=(apt-get -qq -o DPkg::Lock::Timeout=600 -o Dpkg::Use-Pty=0)
	"${apt[@]}" update >&2 || echo "deps: apt-get update failed; trying with the lists that are there" >&2
	"${apt[@]}" install -y --no-install-recommends "${missing[@]}" >&2 ||
		fail "apt-get cannot install ${missing[*]}; are they in this release's sources? (Debian 12 and later, Ubuntu 24.04 and later)"
}

# without_service COMMAND: what it installs is not started as a service of this
# machine, where nobody said otherwise.
without_service() {
	local policy=/usr/sbin/policy-rc.d
	if [ -e $policy ] || [ ! -w ${policy%/*} ]; then
		"$@"
		return
	fi
	trap "rm -f $policy" EXIT
	printf '#!/bin/sh\nexit 101\n' >$policy
	chmod 755 $policy
	"$@"
	rm -f $policy
	trap - EXIT
}

# masked SERVICE COMMAND: the same, and SERVICE does not start with this machine later, either.
# A program that a test needs opens no port to anybody.
masked() {
	local unit=/etc/systemd/system/$1.service
	shift
	if [ ! -e "$unit" ] && [ ! -L "$unit" ] && [ "$(id -u)" = 0 ]; then
		mkdir -p /etc/systemd/system
		ln -s /dev/null "$unit"
		echo "deps: ${unit##*/} is masked, since only tests want it; systemctl unmask ${unit##*/} lets it start" >&2
	fi
	without_service "$@"
}

bpffs() {
	grep -q ' /sys/fs/bpf bpf ' /proc/mounts && return 0
	need_root "mounting the bpf file system"
	[ -d /sys/fs/bpf ] || fail "there is no /sys/fs/bpf: this kernel has no eBPF, or /sys is not mounted"
	locked
	grep -q ' /sys/fs/bpf bpf ' /proc/mounts && return 0
	echo "deps: mounting the bpf file system at /sys/fs/bpf" >&2
	mount -t bpf bpf /sys/fs/bpf
}

# Debian 12's own Go is older than what go.mod names, and fails with errors about
# that file. Go 1.21 and later fetch a newer one by themselves, where they may.
want=$(sed -n 's/^go //p' go.mod)
get="install Go $want or later from https://go.dev/dl/ (unpack it to /usr/local, and put /usr/local/go/bin first in PATH)"
command -v go >/dev/null || fail "there is no go command; $get"
have=$(go env GOVERSION 2>&1) || fail "$(command -v go) does not do: $have; $get"
[ "$(printf '%s\n' "go$want" "$have" | sort -V | head -n 1)" = "go$want" ] ||
	fail "$(command -v go) is $have, too old for this; $get"
[ $# -gt 0 ] || fail "expect run, test, bare, kernels, arm64 or clang"
for what in "$@"; do
	case $what in
	run)
		bpffs
		install nft=nftables ping=iputils-ping ip=iproute2 sysctl=procps
		;;
	test)
		install curl=curl openssl=openssl iperf3=iperf3 tshark=tshark scapy=python3-scapy systemd-analyze=systemd lintian=lintian
		command -v nfcapd >/dev/null && command -v nfacctd >/dev/null || without_service install nfcapd=nfdump nfacctd=pmacct
		command -v vtysh >/dev/null || without_service install vtysh=frr
		command -v etcd >/dev/null || without_service install etcd=etcd-server
		command -v haproxy >/dev/null || without_service install haproxy=haproxy
		# Programs that tests have go through functions on byte streams.
		install ssh=openssh-client
		command -v nginx >/dev/null || masked nginx install nginx=nginx
		command -v sshd >/dev/null || masked ssh install sshd=openssh-server
		# Debian has the server's programs outside of PATH.
		command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || masked postgresql install initdb=postgresql
		install psql=postgresql-client
		;;
	bare) install debootstrap=debootstrap mke2fs=e2fsprogs ;;
	kernels)
		install qemu-system-x86_64=qemu-system-x86 busybox=busybox-static ip=iproute2 nft=nftables ping=iputils-ping \
			xz=xz-utils dpkg-deb=dpkg ldd=libc-bin
		command -v vtysh >/dev/null || without_service install vtysh=frr
		;;
	arm64) install qemu-system-aarch64=qemu-system-arm xz=xz-utils dpkg-deb=dpkg ;;
	clang) install clang-19=clang-19 llvm-strip-19=llvm-19 clang-format-19=clang-format-19 ;;
	*) fail "$what is not run, test, bare, kernels, arm64 or clang" ;;
	esac
done
