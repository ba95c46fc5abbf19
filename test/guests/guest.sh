#!/bin/bash
# In each guest, at each boot: the network of the tutorial, and a server for the commands of guest a, which drives.
node=$(hostname)
# Before there is a network, so that no agent is ready.
forwarding=$(sysctl -n net.ipv6.conf.all.forwarding)
ip link set dev lo up
# udev may not have come to the device yet.
modprobe "$(cat /srv/driver)"
for _ in $(seq 300); do
	core=$(ip -o link | sed -n 's/^[0-9]*: \([^:@]*\).*52:54:00:07:07:0.*/\1/p')
	[ -z "$core" ] || break
	sleep 1
done
udevadm settle # which renames it
core=$(ip -o link | sed -n 's/^[0-9]*: \([^:@]*\).*52:54:00:07:07:0.*/\1/p')
address() { ip address add "$2" dev "$1" nodad; }
hosts() { # NAMESPACE DEVICE: a host behind this node
	ip netns add "$1"
	ip link add "$2" type veth peer name eth0 netns "$1"
	ip link set dev "$2" up
	ip -n "$1" link set dev lo up
	ip -n "$1" link set dev eth0 up
}
rename() { ip link set dev "$core" down && ip link set dev "$core" name "$1" && ip link set dev "$1" mtu 1500 up; }
case $node in
a)
	rename eth1
	hosts h1 eth0
	ip link set dev eth0 mtu 1380
	ip -n h1 link set dev eth0 mtu 1380
	address eth1 fd00:1::a/64
	address eth0 2001:db8:1::1/64
	ip -n h1 address add 2001:db8:1::2/64 dev eth0 nodad
	ip -n h1 route add default via 2001:db8:1::1
	ip route add 2001:db8:2::/64 via fd00:1::c
	;;
b)
	rename eth0
	address eth0 fd00:1::b/64
	;;
c)
	rename eth0
	hosts h2 eth1
	ip link set dev eth1 mtu 1380
	ip -n h2 link set dev eth0 mtu 1380
	address eth0 fd00:1::c/64
	address eth1 2001:db8:2::1/64
	ip -n h2 address add 2001:db8:2::2/64 dev eth0 nodad
	ip -n h2 route add default via 2001:db8:2::1
	ip route add 2001:db8:1::/64 via fd00:1::a
	head -c 2000000 /dev/urandom >/srv/content
	ip netns exec h2 socat TCP6-LISTEN:80,reuseaddr,fork OPEN:/srv/content,rdonly &
	# What clients send, it takes the sum of.
	ip netns exec h2 socat -u TCP6-LISTEN:81,reuseaddr,fork SYSTEM:'sha256sum >/srv/sum.new && mv /srv/sum.new /srv/uploaded' &
	;;
esac
[ $node = b ] || ip route add fd00:5:0:b00::/56 via fd00:1::b
[ $node = c ] || ip route add fd00:5:0:c00::/56 via fd00:1::c
echo "guest $node is up, forwarding $forwarding"
if [ $node = a ]; then
	exec /srv/drive.sh >/dev/ttyS1 2>&1
fi
# One line is a command; the answer is its output and its exit code.
cat >/run/answer <<'ANSWER'
#!/bin/bash
read -r command
export DEBIAN_FRONTEND=noninteractive
bash -c "$command" 2>&1
echo "exit $?"
ANSWER
chmod 0755 /run/answer
exec socat -t 600 TCP6-LISTEN:7777,reuseaddr,fork EXEC:/run/answer
