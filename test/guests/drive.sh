#!/bin/bash
# In guest a: every step, here and on b and c. Ends with "passed N" or "failed".
export DEBIAN_FRONTEND=noninteractive
steps=0
step() { echo "--- $*" && steps=$((steps + 1)); }
fail() {
	echo "$*"
	for n in a b c; do on $n "systemctl --no-pager status waystamp-agent@$n; journalctl --no-pager -o cat -n 15 -u waystamp-agent@$n" | sed "s/^/$n: /"; done
	echo failed
	sleep infinity
}
# on NODE COMMAND: what it prints, and whether it did.
on() {
	local node=$1 out
	shift
	if [ "$node" = a ]; then
		bash -c "$*" 2>&1
		return
	fi
	out=$(echo "$*" | timeout 700 socat -t 600 - "TCP6:[fd00:1::$node]:7777,connect-timeout=5") || return 1
	sed '$d' <<<"$out"
	[ "$(tail -n 1 <<<"$out")" = "exit 0" ]
}
must() { local out; out=$(on "$@") || fail "on $1: ${*:2}: $out"; echo "$out"; }
until_true() { # SECONDS COMMAND
	local n
	for n in $(seq "$1"); do "${@:2}" >/dev/null 2>&1 && return; sleep 1; done
	fail "never: ${*:2}"
}
up() { on "$1" true; }
# frames that c has verified in the chain.
verified() { on c "waystamp get paths --instance c -o json" | tr -d ' \n' | grep -o '"role":"egress"[^}]*"frames":[0-9]*' | grep -o '[0-9]*$' | head -n 1; }
download() {
	local before after sum
	before=$(verified)
	sum=$(ip netns exec h1 timeout 300 socat -u "TCP6:[2001:db8:2::2]:80" - | sha256sum)
	[ "$sum" = "$(on c sha256sum '</srv/content')" ] || fail "the download is not what the server has"
	# The acknowledgements of 2 MB take the chain: its forward direction is h1 to h2.
	after=$(verified)
	[ "$((after - ${before:-0}))" -gt 20 ] || fail "c has verified $before frames before the download, and $after after it"
	echo "2 MB, $((after - ${before:-0})) frames verified"
}

for n in b c; do until_true 300 up $n; done
. /etc/os-release
echo "$PRETTY_NAME, $(uname -r)"

step apt installs the package
for n in a b c; do
	must $n apt-get install -y --no-install-recommends /srv/first.deb >/dev/null
	[ "$(must $n stat -c %a /etc/waystamp)" = 700 ] || fail "$n: others can read the directory of plans"
done

step a plan, and systemd
for n in c b a; do
	must $n "install -m 0600 /srv/plans/$n.json /etc/waystamp/$n.json; echo net.ipv6.conf.all.forwarding=1 >/etc/waystamp/$n.sysctl"
	on $n "waystamp doctor --plan /etc/waystamp/$n.json" | grep -v '^yes' | head -n 20
	must $n "systemctl enable --now waystamp-agent@$n" >/dev/null
	must $n "waystamp status --instance $n" | head -n 3
done

step TCP through the chain of three machines
download

step nothing passes where a node was left out
# c takes plain packets of the chain from nobody.
must a "systemctl stop waystamp-agent@a" >/dev/null
must a "waystamp agent --detach --yes --instance a" >/dev/null
ip netns exec h1 ping -c 3 -W 2 2001:db8:2::2 >/dev/null 2>&1 && fail "plain packets reach h2"
must a "systemctl start waystamp-agent@a" >/dev/null
download

step an upgrade under load loses nothing
ip netns exec h1 ping -i 0.1 -W 60 2001:db8:2::2 >/tmp/ping &
ping=$!
for n in b c a; do
	was=$(must $n "systemctl show -P MainPID waystamp-agent@$n")
	must $n apt-get install -y --no-install-recommends /srv/second.deb >/dev/null
	[ "$(must $n "systemctl show -P MainPID waystamp-agent@$n")" != "$was" ] || fail "$n: the agent was not restarted"
	must $n "systemctl is-active waystamp-agent@$n" >/dev/null
done
sleep 2
kill -INT $ping
wait $ping
tail -n 3 /tmp/ping
grep -q ' 0% packet loss' /tmp/ping || fail "packets were lost"
[ "$(must b "dpkg-query -Wf '\${Version}\\n' waystamp")" = 1.1 ] || fail "b has another version"

step a downgrade
must b apt-get install -y --allow-downgrades --no-install-recommends /srv/first.deb >/dev/null
download

step the agent without root
must b "systemctl stop waystamp-agent@b && waystamp agent --detach --yes --instance b" >/dev/null
must b "install -D -m 0644 /usr/share/waystamp/unprivileged.conf /etc/systemd/system/waystamp-agent@.service.d/unprivileged.conf && systemctl daemon-reload"
must b "chgrp waystamp /etc/waystamp && chmod 0750 /etc/waystamp && chown waystamp /etc/waystamp/b.json && systemctl start waystamp-agent@b"
[ "$(must b 'ps -o user= -p $(systemctl show -P MainPID waystamp-agent@b)')" = waystamp ] || fail "it runs as $(on b 'ps -o user= -p $(systemctl show -P MainPID waystamp-agent@b)')"
download

step a reboot of b and of c
for n in b c; do
	before=$(on $n cat /proc/sys/kernel/random/boot_id)
	on $n 'systemd-run --on-active=2 systemctl reboot' >/dev/null
	rebooted() { local now; now=$(on $n cat /proc/sys/kernel/random/boot_id) && [ -n "$now" ] && [ "$now" != "$before" ]; }
	until_true 600 rebooted
	# The network of this test comes after the boot, and the unit tries again every two seconds.
	until_true 300 on $n "systemctl is-active waystamp-agent@$n"
	must $n "journalctl -b -o cat -u guest | grep -m 1 'is up, forwarding'"
	must $n "journalctl -b -o cat -u guest | grep -q 'is up, forwarding 0'"
	until_true 60 on $n '[ $(sysctl -n net.ipv6.conf.all.forwarding) = 1 ]'
done
before=
download

step the controller
must a "systemctl start waystamp-controller && systemctl is-active waystamp-controller && waystamp get nodes && waystamp node token r1"
[ "$(must a 'ps -o user= -p $(systemctl show -P MainPID waystamp-controller)' | cut -c1-8)" = waystamp ] || fail "the controller is somebody else's"
must a "systemctl stop waystamp-controller"

step removal says what stays, and a purge waits for it
must c apt-get remove -y waystamp | grep -q "detach --yes --instance c" || fail "nothing is said of the data path"
ip netns exec h1 ping -c 2 -W 10 2001:db8:2::2 >/dev/null || fail "the data path did not stay"
on c dpkg --purge waystamp && fail "it purges what is at work"
must c "apt-get install -y --no-install-recommends /srv/second.deb && systemctl stop waystamp-agent@c; waystamp agent --detach --yes --instance c && apt-get purge -y waystamp" >/dev/null
[ -z "$(on c 'ls -d /etc/waystamp /var/lib/waystamp /usr/bin/waystamp 2>/dev/null')" ] || fail "the purge leaves things"
echo "passed $steps"
sleep infinity
