#!/usr/bin/env bash
# Installs the Debian package on three machines of one release and runs the smallest domain on them, as docs/how-to/install.md
# says: apt, systemd, a chain over virtio, XDP, fresh secrets and an upgrade under load, the agent without root, a reboot, removal. The machines
# are qemu guests without KVM, on a bus of datagrams on this machine's loopback; hosts are network namespaces in the guests.
#
#   [NIC=e1000e] [QUEUES=4] [FROM=COMMIT] test/guests/run.sh [bookworm|trixie] [STEP ...]        (make test-guests RELEASE=trixie STEPS='reboot controller')
#
# The steps are those of drive.sh; installation and start are always among them. NIC is the device that the machines have, and
# its driver: virtio (the default), which has native XDP, or e1000e, which has none. QUEUES is how many pairs of queues a virtio
# device has: with more than one a machine has two CPUs, and the bus is a bridge of this machine's in a namespace of its own,
# with segmentation and checksums left to the devices. FROM is the commit whose package is installed first, with plans of its
# own; otherwise the upgrade is to the same programs by another name.
#
# It needs root, for debootstrap. Below /var/tmp it takes 2 GB until it ends, however it ends but by SIGKILL; guests
# are its children, and end with it.
set -euo pipefail

release=${1:-bookworm}
shift $(($# > 0))
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."

say() { echo "guests: $*" >&2; }

fail() {
	say "$@"
	exit 1
}

case ${NIC:-virtio} in
virtio) device=virtio-net-pci driver=virtio_net ;;
e1000e) device=e1000e driver=e1000e ;;
*) fail "NIC $NIC is not known; expect virtio or e1000e" ;;
esac
queues=${QUEUES:-1}
[[ $queues =~ ^[1-8]$ ]] || fail "QUEUES is $queues; expect 1 to 8"
[ "$queues" = 1 ] || [ $device = virtio-net-pci ] || fail "QUEUES is for virtio; qemu's $device has queues of its own"
[ "$(id -u)" = 0 ] || fail "debootstrap needs root"
for program in debootstrap qemu-system-x86_64 mke2fs busybox dpkg-deb; do
	command -v $program >/dev/null || fail "there is no $program; run make deps-kernels, and tools/deps.sh bare"
done

for old in /var/tmp/waystamp-guests-*; do
	pid=${old##*-}
	[ -d "$old" ] && ! kill -0 "$pid" 2>/dev/null && rm -rf "$old"
done
for old in $(ip netns list | sed -n 's/^\(ws-guests-[0-9]*\).*/\1/p'); do
	kill -0 "${old##*-}" 2>/dev/null || ip netns del "$old"
done
work=/var/tmp/waystamp-guests-$$
bus=ws-guests-$$
mkdir -m 0700 $work
guests=()
end() {
	local g
	for g in "${guests[@]}"; do kill "$g" 2>/dev/null || true; done
	for g in "${guests[@]}"; do wait "$g" 2>/dev/null || true; done
	[ ! -e /run/netns/$bus ] || ip netns del $bus
	rm -rf $work
}
trap end EXIT
trap 'exit 130' INT TERM HUP

# Two versions of the package, the second one later.
made() { # VERSION TREE
	(cd "$2" && PACKAGE_COMPRESSION=none PACKAGE_VERSION=$1 SOURCE_DATE_EPOCH=1700000000 packaging/build.sh bin amd64 $work/debs-"$1") >/dev/null
	ls $work/debs-"$1"/waystamp_*.deb
}
before=.
if [ -n "${FROM:-}" ]; then
	before=$work/before
	git rev-parse -q --verify "$FROM^{commit}" >/dev/null || fail "FROM is $FROM, which is no commit that is here"
	say "building $FROM"
	git clone -q --no-checkout . "$before"
	git -C "$before" checkout -q --detach "$(git rev-parse "$FROM^{commit}")"
	make -s -C "$before" build >/dev/null || fail "$FROM does not build"
fi
say "making two versions of the package"
first=$(made 1.0 $before)
second=$(made 1.1 .)

began=$SECONDS
root=$work/root
mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI) $(COMPONENT)' 'Identifier: Packages' | awk '$1 == "Debian" && $3 == "main" && $2 !~ /security/ {print $2; exit}')
proxy=
eval "$(apt-config shell proxy Acquire::http::Proxy)"
[ -z "$proxy" ] || [ "$proxy" = DIRECT ] || export http_proxy=$proxy
debootstrap --variant=minbase --include=systemd,systemd-sysv,udev,dbus,iproute2,bpftool,iputils-ping,socat,procps,nftables,kmod,curl,linux-image-amd64 \
	"$release" $root "$mirror" >$work/debootstrap.log 2>&1 </dev/null || {
	tail -n 20 $work/debootstrap.log >&2
	fail "debootstrap failed"
}
say "made Debian $release in $((SECONDS - began)) s"
kernel=$(ls $root/boot/vmlinuz-*)
version=${kernel##*vmlinuz-}
say "its kernel is $version"

# Only the modules that a guest needs.
find $root/lib/modules/"$version"/kernel/drivers -mindepth 1 -maxdepth 1 ! -name net ! -name virtio ! -name block ! -name char ! -name pps ! -name ptp -exec rm -rf {} +
find $root/lib/modules/"$version"/kernel/drivers/net -mindepth 1 -maxdepth 1 -type d ! -name ethernet -exec rm -rf {} +
find $root/lib/modules/"$version"/kernel/drivers/net/ethernet -mindepth 1 -maxdepth 1 ! -name intel -exec rm -rf {} +
find $root/lib/modules/"$version"/kernel/{sound,fs} -mindepth 1 -maxdepth 1 ! -name 'ext4' ! -name 'jbd2' ! -name 'mbcache*' -exec rm -rf {} + 2>/dev/null || true
cp $root/boot/vmlinuz-"$version" $work/vmlinuz
rm -rf $root/boot/* $root/var/cache/apt/archives/*.deb

cp "$first" $root/srv/first.deb
cp "$second" $root/srv/second.deb
cp "$here"/guest.sh "$here"/drive.sh $root/srv/
chmod 0755 $root/srv/*.sh
for s in "$@"; do
	grep -q "^if step $s " "$here"/drive.sh || fail "there is no step $s; expect some of" $(sed -n 's/^if step \([^ ]*\).*/\1/p' "$here"/drive.sh)
done
echo "$*" >$root/srv/steps
echo $driver >$root/srv/driver
echo "$queues" >$root/srv/queues
$before/bin/waystamp plan -f examples/minimal.yaml --out $work/plans >/dev/null
cp -r $work/plans/nodes $root/srv/nodes
# The next plan of the same domain: core interfaces have XDP.
sed 's/role: core}/role: core, datapath: xdp}/' examples/minimal.yaml >$work/xdp.yaml
grep -q 'datapath: xdp' $work/xdp.yaml || fail "examples/minimal.yaml has no core interface that could have XDP"
$before/bin/waystamp plan -f $work/xdp.yaml --out $work/plans >/dev/null
cp -r $work/plans/nodes $root/srv/nodes-xdp
cp -r $work/plans $root/srv/plans # for changes of the guests' own
cat >$root/etc/systemd/system/guest.service <<'UNIT'
[Unit]
After=multi-user.target
[Service]
Type=simple
ExecStart=/srv/guest.sh
StandardOutput=journal+console
StandardError=journal+console
[Install]
WantedBy=multi-user.target
UNIT
chroot $root systemctl enable guest.service >/dev/null 2>&1
chroot $root systemctl mask serial-getty@ttyS0.service getty@tty1.service systemd-networkd-wait-online.service apt-daily.timer >/dev/null 2>&1
: >$root/etc/machine-id

# What mounts the disk.
mkdir -p $work/initramfs/{bin,proc,sys,dev,disk,lib}
cp "$(command -v busybox)" $work/initramfs/bin/busybox
for m in virtio_pci virtio_blk ext4 crc32c_generic; do
	chroot $root modprobe -S "$version" --show-depends $m | sed -n "s|^insmod \([^ ]*\).*|$root\1|p"
done | awk '!seen[$0]++' >$work/modules
[ -s $work/modules ] || say "the kernel has all drivers built in"
while read -r m; do
	name=$(basename "$m")
	case $m in
	*.xz) xz -dc "$m" >$work/initramfs/lib/"${name%.xz}" && echo "${name%.xz}" ;;
	*.zst) zstd -qdc "$m" >$work/initramfs/lib/"${name%.zst}" && echo "${name%.zst}" ;;
	*) cp "$m" $work/initramfs/lib/ && echo "$name" ;;
	esac
done <$work/modules >$work/initramfs/order
cat >$work/initramfs/init <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sysfs /sys
/bin/busybox mount -t devtmpfs devtmpfs /dev
while read -r m; do /bin/busybox insmod /lib/$m; done </order
until [ -b /dev/vda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda /disk
/bin/busybox umount /proc
/bin/busybox umount /sys
exec /bin/busybox switch_root /disk /sbin/init
INIT
chmod 0755 $work/initramfs/init
(cd $work/initramfs && find . | busybox cpio -o -H newc 2>/dev/null) >$work/initramfs.cpio
mke2fs -q -F -t ext4 -d $root $work/disk.img 2500M
rm -rf $root

# The port of the bus: nobody else's on this machine, most likely.
port=$((20000 + $$ % 20000))
network() { # NUMBER: the arguments of a machine's device
	local mac=romfile=,mac=52:54:00:07:07:0$1
	if [ "$queues" = 1 ]; then
		echo -smp 1 -netdev socket,id=bus,mcast=239.7.7.7:$port,localaddr=127.0.0.1 -device $device,netdev=bus,$mac
	else
		echo -smp 2 -netdev tap,id=bus,ifname=guest"$1",script=no,downscript=no,queues="$queues" \
			-device $device,netdev=bus,$mac,mq=on,vectors=$((2 * queues + 2))
	fi
}
in_bus=
if [ "$queues" -gt 1 ]; then
	ip netns add $bus
	in_bus="ip netns exec $bus"
	$in_bus sysctl -q -w net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
	$in_bus ip link add bus type bridge mcast_snooping 0
	$in_bus ip link set dev bus up
	for n in 1 2 3; do
		$in_bus ip tuntap add dev guest$n mode tap multi_queue
		$in_bus ip link set dev guest$n master bus up
	done
fi
# A machine that reboots is one that ends and is started again with its disk: a reset leaves qemu's own emulator
# many times slower than it was. It may do so twice.
boot() { # NODE NUMBER
	cp --sparse=always --reflink=auto $work/disk.img $work/"$1".img
	(
		for _ in 1 2 3; do
			# shellcheck disable=SC2046
			$in_bus qemu-system-x86_64 -accel tcg -cpu max,-erms,-fsrm -m 1024 -nodefaults -display none -monitor none -no-reboot \
				-kernel $work/vmlinuz -initrd $work/initramfs.cpio \
				-append "console=ttyS0 loglevel=5 panic=-1 no_timer_check nowatchdog sysctl.kernel.hung_task_timeout_secs=0 systemd.hostname=$1 systemd.show_status=0" \
				-drive file=$work/"$1".img,format=raw,if=virtio,cache=unsafe \
				$(network "$2") \
				-chardev file,id=console,path=$work/"$1".console,append=on -serial chardev:console \
				-chardev file,id=said,path=$work/"$1".said,append=on -serial chardev:said &
			trap "kill $!; exit 1" TERM
			wait $! || exit 1
		done
	) &
	guests+=($!)
}
boot a 1
boot b 2
boot c 3
say "booted three guests; what a says follows"
began=$SECONDS
tail -n +1 -F $work/a.said 2>/dev/null &
guests+=($!)
silence=0 size=0
while ! grep -qsE '^(passed|failed)' $work/a.said; do
	for g in "${guests[@]:0:3}"; do kill -0 "$g" 2>/dev/null || fail "a guest has ended: $(tail -n 20 $work/*.console)"; done
	now=$(cat $work/*.said $work/*.console 2>/dev/null | wc -c || true)
	if [ "$now" = $size ]; then silence=$((silence + 1)); else silence=0; fi
	size=$now
	[ $silence -lt 600 ] || fail "the guests say nothing for 600 s: $(tail -n 20 $work/*.console)"
	sleep 1
done
# As the other matrix does (test/kernels/kmsg.go). With loglevel=5 the console has warnings, which quiet leaves out.
if grep -E '(WARNING|BUG|KASAN|Oops|UBSAN|refcount_t|int3): |general protection fault|Kernel panic|INFO: task ' $work/*.console >&2; then
	fail "a kernel complains"
fi
if grep -q '^failed' $work/a.said; then
	tail -n 20 $work/*.console $work/a.said >&2
	fail "the package does not do on $release ($version, $driver, $queues queues) what it must"
fi
say "Debian $release, Linux $version, $driver, $queues queues: $(sed -n 's/^passed //p' $work/a.said) steps passed in $((SECONDS - began)) s"
