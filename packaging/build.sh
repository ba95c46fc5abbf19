#!/usr/bin/env bash
# Makes the Debian packages of what is in bin/: waystamp, which a node needs, and
# waystamp-lab, which shows and measures it on one machine. The same commit gives
# the same bytes: times are the commit's, or SOURCE_DATE_EPOCH. Where there is no git,
# SOURCE_DATE_EPOCH and PACKAGE_VERSION have to be given.
#
#   packaging/build.sh BIN ARCHITECTURE OUT    packaging/build.sh bin amd64 dist
set -euo pipefail

fail() {
	echo "package: $*" >&2
	exit 1
}

[ $# = 3 ] || fail "usage: packaging/build.sh BIN ARCHITECTURE OUT"
bin=$1 arch=$2 out=$3
cd "$(dirname "$0")/.."
command -v dpkg-deb >/dev/null || fail "there is no dpkg-deb: packages are made on Debian and what comes from it"
[ -x "$bin/waystamp" ] && [ -x "$bin/waystamp-lab" ] || fail "$bin has no waystamp and waystamp-lab; run make build"

if [ -z "${SOURCE_DATE_EPOCH:-}" ] || [ -z "${PACKAGE_VERSION:-}" ]; then
	git rev-parse HEAD >/dev/null || fail "without git, give SOURCE_DATE_EPOCH (seconds) and PACKAGE_VERSION"
fi
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export LC_ALL=C.UTF-8 TZ=UTC
umask 022

# A version that dpkg orders: a tag's, with the commits since then; before the
# first tag, by the commit's time.
if [ -n "${PACKAGE_VERSION:-}" ]; then
	version=$PACKAGE_VERSION
elif tag=$(git describe --tags --match 'v[0-9]*' 2>/dev/null); then
	version=$(sed -E 's/^v//; s/-rc/~rc/; s/-([0-9]+)-g/+\1.g/' <<<"$tag")
else
	version=0~$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d%H%M%S).$(git rev-parse --short=10 HEAD)
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

maintainer="waystamp maintainers <maintainers@waystamp.example>"

# control NAME ROOT FIELDS: what apt shows of a package. The first line of
# standard input is its summary.
control() {
	local root=$2
	mkdir -p "$root/DEBIAN"
	{
		echo "Package: $1"
		echo "Version: $version"
		echo "Architecture: $arch"
		echo "Maintainer: $maintainer"
		echo "Installed-Size: $(du -sk --apparent-size --exclude DEBIAN "$root" | cut -f1)"
		echo "Section: net"
		echo "Priority: optional"
		printf '%s\n' "${@:3}"
		printf 'Description: '
		cat
	} >"$root/DEBIAN/control"
	(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
}

# papers NAME ROOT: what Debian's policy wants in a package's folder of documents. Debian's changelog has an entry for this version
# alone, and says where the changes are.
papers() {
	local doc=$2/usr/share/doc/$1
	mkdir -p "$doc" "$2/usr/share/lintian/overrides"
	install -m 0644 packaging/debian/copyright "$doc/copyright"
	printf '%s (%s) unstable; urgency=medium\n\n  * Changes: /usr/share/doc/waystamp/CHANGELOG.md.gz\n\n -- %s  %s\n' \
		"$1" "$version" "$maintainer" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9nc >"$doc/changelog.gz"
	install -m 0644 "packaging/debian/$1.lintian-overrides" "$2/usr/share/lintian/overrides/$1"
}

# pack NAME ROOT
pack() {
	local file="$out/$1_${version}_$arch.deb"
	find "$2" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	dpkg-deb --root-owner-group "-Z${PACKAGE_COMPRESSION:-xz}" --build "$2" "$file" >/dev/null
	echo "$file"
}

mkdir -p "$out"

root=$work/waystamp
install -D -m 0755 "$bin/waystamp" "$root/usr/bin/waystamp"
install -D -m 0644 packaging/waystamp-agent@.service "$root/usr/lib/systemd/system/waystamp-agent@.service"
install -D -m 0644 packaging/waystamp-controller.service "$root/usr/lib/systemd/system/waystamp-controller.service"
install -D -m 0644 packaging/waystamp-bpf.service "$root/usr/lib/systemd/system/waystamp-bpf.service"
install -D -m 0644 packaging/grafana.json "$root/usr/share/waystamp/grafana.json"
install -D -m 0644 packaging/unprivileged.conf "$root/usr/share/waystamp/unprivileged.conf"
install -D -m 0644 packaging/waystamp.tmpfiles "$root/usr/lib/tmpfiles.d/waystamp.conf"
install -D -m 0644 packaging/waystamp.sysusers "$root/usr/lib/sysusers.d/waystamp.conf"
for shell in bash:usr/share/bash-completion/completions/waystamp zsh:usr/share/zsh/vendor-completions/_waystamp fish:usr/share/fish/vendor_completions.d/waystamp.fish; do
	mkdir -p "$(dirname "$root/${shell#*:}")"
	"${PACKAGE_RUN:-$bin}/waystamp" completion "${shell%%:*}" >"$root/${shell#*:}"
done
go run ./tools/refgen -man "$root/usr/share/man/man1"
gzip -9n "$root"/usr/share/man/man1/*
doc=$root/usr/share/doc/waystamp
mkdir -p "$doc"
install -m 0644 README.md SECURITY.md ARCHITECTURE.md LICENSES/BSD-2-Clause.txt "$doc"
papers waystamp "$root"
gzip -9nc CHANGELOG.md >"$doc/CHANGELOG.md.gz"
cp -r docs "$doc/docs"
rm -rf "$doc/docs/performance" "$doc/docs/next.md"
mkdir "$doc/examples"
install -m 0644 examples/*.yaml "$doc/examples"
install -D -m 0644 tools/wireshark/waystamp.lua "$root/usr/share/waystamp/waystamp.lua"
install -D -m 0755 tools/wireshark/waystamp-extcap "$root/usr/share/waystamp/waystamp-extcap"
# Where Debian's Wireshark looks for programs to capture with.
case $arch in
amd64) triplet=x86_64-linux-gnu ;;
arm64) triplet=aarch64-linux-gnu ;;
*) fail "the folder of Wireshark's programs is not known for $arch" ;;
esac
mkdir -p "$root/usr/lib/$triplet/wireshark/extcap"
ln -s ../../../../share/waystamp/waystamp-extcap "$root/usr/lib/$triplet/wireshark/extcap/waystamp"
control waystamp "$root" "Recommends: nftables" "Suggests: waystamp-lab, wireshark" <<'DESCRIPTION'
service function chaining that proves itself
 Steers packets through an ordered list of network functions by SRv6. Each hop
 stamps each packet, the last one checks the stamps, and refuses packets that
 did not take the path. All in eBPF, on Linux 6.1 and later.
DESCRIPTION
for script in postinst prerm postrm; do
	install -m 0755 "packaging/debian/$script" "$root/DEBIAN/$script"
done
pack waystamp "$root"

root=$work/waystamp-lab
install -D -m 0755 "$bin/waystamp-lab" "$root/usr/bin/waystamp-lab"
papers waystamp-lab "$root"
control waystamp-lab "$root" "Depends: waystamp (= $version), iproute2, nftables" "Recommends: tshark" <<'DESCRIPTION'
laboratory and measurements of waystamp
 Builds a domain in network namespaces of one machine, attacks it, shows it, and
 measures it beside the kernel's own segment routing: waystamp lab, demo, bench.
DESCRIPTION
pack waystamp-lab "$root"
