#!/bin/bash
# In guest a: every step, here and on b and c. Ends with "passed N" or "failed".
export DEBIAN_FRONTEND=noninteractive
# The tester reads it, also of a subshell whose output somebody keeps.
exec 3>&1
steps=0
# step NAME WHAT: whether this step is wanted. All are; or those that the tester names, and installation and start.
step() {
	local name=$1
	shift
	case " install start $(cat /srv/steps) " in
	*" $name "* | " install start  ") echo "--- $(cut -d. -f1 /proc/uptime) s: $*" && steps=$((steps + 1)) ;;
	*) return 1 ;;
	esac
}
fail() {
	local limit=60
	{
		echo "$*"
		for n in a b c; do on $n "systemctl --no-pager status waystamp-agent@$n; journalctl --no-pager -o cat -n 15 -u waystamp-agent@$n" | sed "s/^/$n: /"; done
		echo failed
	} >&3
	sleep infinity
}
# on NODE COMMAND: what it prints, and whether it did. A machine that reboots leaves a connection open for ever, so that it has a
# limit, of $limit seconds.
on() {
	local node=$1 out
	shift
	if [ "$node" = a ]; then
		bash -c "$*" 2>&1
		return
	fi
	out=$(echo "$*" | timeout "${limit:-700}" socat -t 600 - "TCP6:[fd00:1::$node]:7777,connect-timeout=5") || return 1
	sed '$d' <<<"$out"
	[ "$(tail -n 1 <<<"$out")" = "exit 0" ]
}
must() { local out; out=$(on "$@") || fail "on $1: ${*:2}: $out"; echo "$out"; }
until_true() { # SECONDS COMMAND
	local limit=30 until=$((SECONDS + $1))
	while [ $SECONDS -lt $until ]; do "${@:2}" >/dev/null 2>&1 && return; sleep 1; done
	fail "never: ${*:2}"
}
up() { on "$1" true; }
# block PAGE HEADING N: the Nth block below a heading of a page, as the package has installed it.
block() {
	awk -v heading="## $2" -v want="$3" '
		BEGIN { here = heading == "## " } # before the first one
		/^## / { here = $0 == heading }
		here && /^```/ { open = !open; n += open; next }
		here && open && n == want' /usr/share/doc/waystamp/docs/how-to/"$1"
}
# does NODE PAGE HEADING N: runs the commands of that block on a node, with the node's name for r1 and its instance for the default
# one. The last one must do; watch ends by Ctrl-C.
does() {
	local text
	text=$(block "$2" "$3" "$4" | sed "s/\br1\b/$1/g; s#/waystamp/default/#/waystamp/$1/#; s/^waystamp watch.*/timeout --preserve-status -s INT 10 waystamp watch || [ \$? = 130 ]/")
	[ -n "$text" ] || fail "$2 has no block $4 below \"$3\""
	must "$1" "cd /srv && echo $(base64 -w 0 <<<"$text") | base64 -d | bash"
}
# frames NODE ROLE: those that a node has had in the chain.
frames() { on "$1" "waystamp get paths --instance $1 -o json" | tr -d ' \n' | grep -o "\"role\":\"$2\"[^}]*\"frames\":[0-9]*" | grep -o '[0-9]*$' | head -n 1; }
verified() { frames c egress; }
# all_verified N: of N pings each has entered, was stamped on b, and verified. TCP's counts differ: the bus loses frames.
all_verified() {
	local a b c
	a=$(frames a headend) b=$(frames b endpoint) c=$(verified)
	ip netns exec h1 ping -q -c "$1" -i 0.05 -W 30 2001:db8:2::2 >/dev/null || return 1
	[ "$(($(frames a headend) - a)) $(($(frames b endpoint) - b)) $(($(verified) - c))" = "$1 $1 $1" ]
}
# uploaded FILE: the server has had what this sum is of.
uploaded() { [ "$(on c cat /srv/uploaded)" = "$(cat "$1")" ]; }
upload() {
	head -c 2000000 /dev/urandom >/tmp/up
	sha256sum </tmp/up >/tmp/sum
	ip netns exec h1 timeout 300 socat -u OPEN:/tmp/up,rdonly "TCP6:[2001:db8:2::2]:81" || fail "the upload ends with $?"
	until_true 60 uploaded /tmp/sum
	echo "2 MB sent"
}
# under_load COMMAND...: meanwhile h1 pings h2, and has a connection to it. No ping is lost, and no byte.
under_load() {
	local ping tcp
	rm -f /tmp/done
	ip netns exec h1 ping -i 0.1 -W 60 2001:db8:2::2 >/tmp/ping &
	ping=$!
	until [ -e /tmp/done ]; do head -c 2000 /dev/urandom && sleep 0.1; done | tee >(sha256sum >/tmp/sent) | ip netns exec h1 socat -u - "TCP6:[2001:db8:2::2]:81" &
	tcp=$!
	"$@"
	sleep 2
	kill -INT $ping
	wait $ping
	tail -n 3 /tmp/ping
	grep -q ' 0% packet loss' /tmp/ping || fail "packets were lost"
	touch /tmp/done
	wait $tcp || fail "the connection ends with $?"
	until_true 60 uploaded /tmp/sent
}
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

# each COMMAND NODE...: on all these nodes at once.
each() {
	local n
	for n in "${@:2}"; do "$1" "$n" & done
	wait
}

for n in b c; do until_true 600 up $n; done
. /etc/os-release
echo "$PRETTY_NAME, $(uname -r)"

if step install "apt installs the package"; then
	install_on() {
		must $1 apt-get install -y --no-install-recommends /srv/first.deb >/dev/null
		[ "$(must $1 stat -c %a /etc/waystamp)" = 700 ] || fail "$1: others can read the directory of plans"
	}
	each install_on a b c
fi

if step start "a plan, and systemd"; then
	start_on() {
		does $1 install.md "Do not forward before the guard is there" 1 >/dev/null
		does $1 install.md "Start a node" 1 >/tmp/start.$1
		must $1 "waystamp status --instance $1" >>/tmp/start.$1
	}
	each start_on a b c
	cat /tmp/start.?
fi

if step look "the commands of troubleshoot.md, and the metrics"; then
	does a troubleshoot.md "" 1 | tail -n 5
	does a troubleshoot.md "" 2 | tail -n 20
	[ "$(does a install.md "Watch it with Prometheus" 1 | grep -c '^waystamp_path_numbers_left')" = 1 ] || fail "no metric of the numbers that are left"
fi

if step tcp "TCP through the chain of three machines, both ways"; then
	download
	upload
	echo "$(frames a headend) frames entered, $(frames b endpoint) were stamped on b, $(verified) verified"
	until_true 120 all_verified 100
	echo "100 pings: as many entered, were stamped on b, and verified"
fi

if step xdp "XDP where the device has it, and a sentence where it has not"; then
	# Frames that programs of this type have had on b.
	ran() { must b "bpftool -j prog show" | tr -d '\n ' | grep -o "\"type\":\"$1\",\"name\":\"ws_[^}]*\"run_cnt\":[0-9]*" | grep -o '[0-9]*$' | awk '{n += $1} END {print n + 0}'; }
	must b sysctl -q -w kernel.bpf_stats_enabled=1
	download
	xdp=$(ran xdp) tc=$(ran sched_cls)
	echo "before: XDP ran $xdp times on b, TC $tc times"
	must b "install -m 0600 /srv/nodes-xdp/b.json /etc/waystamp/b.json"
	if [ "$(cat /srv/driver)" = virtio_net ]; then
		until_true 120 on b "waystamp status --instance b | grep -q 'number 2 since' && waystamp status --instance b | grep -q 'core): tc, xdp'"
		download
		[ $(($(ran xdp) - xdp)) -gt 20 ] || fail "XDP has run $(($(ran xdp) - xdp)) times on b for a download"
		if [ "$(cat /srv/queues)" -gt 1 ]; then
			# Receive queues of b's device by their interrupts, one line each.
			received() { must b "sed -n 's/^ *[0-9]*: *\([0-9]*\) *\([0-9]*\) .*virtio[0-9]*-input.*/\1 \2/p' /proc/interrupts" | awk '{print $1 + $2}'; }
			received >/tmp/queues
			for _ in 1 2 3 4 5 6 7 8; do download; done # a connection each
			used=$(received | paste /tmp/queues - | awk '$2 - $1 > 10' | wc -l)
			echo "$used of $(wc -l </tmp/queues) receive queues of b had packets"
			[ "$used" -gt 1 ] || fail "one queue has had all packets: $(paste -s /tmp/queues), then $(received | paste -s)"
			must b "dmesg | grep -i 'XDP request' || true"
		fi
	else
		until_true 120 on b "waystamp status --instance b | grep -q 'native XDP'"
		on b "waystamp status --instance b"
		[ "$(ran xdp)" = 0 ] || fail "XDP runs on a device that has none"
		download # the plan of before is in force
		must b "install -m 0600 /srv/nodes/b.json /etc/waystamp/b.json"
		until_true 120 on b "waystamp status --instance b"
		download
	fi
	echo "after: XDP ran $(ran xdp) times on b, TC $(ran sched_cls) times"
fi

if step left-out "nothing passes where a node was left out"; then
	# c takes plain packets of the chain from nobody.
	must a "systemctl stop waystamp-agent@a" >/dev/null
	must a "waystamp agent --detach --yes --instance a" >/dev/null
	ip netns exec h1 ping -c 3 -W 2 2001:db8:2::2 >/dev/null 2>&1 && fail "plain packets reach h2"
	must a "systemctl start waystamp-agent@a" >/dev/null
	download
fi

if step change "fresh secrets under load, as change-a-chain.md says"; then
	cp /usr/share/doc/waystamp/examples/minimal.yaml /srv/domain.yaml
	does a change-a-chain.md "Give chains fresh secrets" 1
	# carry FOLDER: its plans are in force on their nodes, each of which shows the digest.
	carry() {
		local n sum
		carry_to() { must $1 "echo $(base64 -w 0 "/srv/plans/$2/$1.json") | base64 -d | install -m 0600 /dev/stdin /etc/waystamp/$1.json.new && mv /etc/waystamp/$1.json.new /etc/waystamp/$1.json"; }
		for n in a b c; do carry_to $n $1; done
		for n in a b c; do
			sum=$(sha256sum <"/srv/plans/$1/$n.json" | cut -c 1-12)
			until_true 120 on $n "waystamp status --instance $n | grep $sum"
		done
	}
	epoch() { must a "waystamp status --instance a" | sed -n 's/^ *epochs *chain web, forward: \([0-9]*\) .*/\1/p'; }
	change() {
		carry 1-both
		carry 2-turn
		sleep 5 # the last packets of the old epoch, as the page says
		carry nodes
	}
	was=$(epoch)
	under_load change
	now=$(epoch)
	[ "${now:-0}" = $((was + 1)) ] || fail "a's epoch was $was, and is $now"
	echo "a's epoch: $was before, $now now"
	download
fi

if step upgrade "an upgrade under load loses nothing"; then
	upgrade() {
		local n was
		for n in b c a; do
			was=$(must $n "systemctl show -P MainPID waystamp-agent@$n")
			must $n apt-get install -y --no-install-recommends /srv/second.deb >/dev/null
			[ "$(must $n "systemctl show -P MainPID waystamp-agent@$n")" != "$was" ] || fail "$n: the agent was not restarted"
			must $n "systemctl is-active waystamp-agent@$n" >/dev/null
		done
	}
	loaded() { # the tag of b's program of the core
		must b "bpftool -j prog show | tr '{' '\n' | sed -n 's/.*\"name\":\"ws_core_tc\".*\"tag\":\"\([0-9a-f]*\)\".*/\1/p' | sort -u"
	}
	was=$(loaded)
	under_load upgrade
	now=$(loaded)
	echo "tag of ws_core_tc on b: $was before, $now now"
	[ -n "$now" ] || fail "b: bpftool shows no program ws_core_tc"
	must b "waystamp version" | grep -q "^ws_core_tc .*$now" || fail "b: waystamp version does not name the tag $now of the program that is loaded"
	[ "$(must b "dpkg-query -Wf '\${Version}\\n' waystamp")" = 1.1 ] || fail "b has another version"
fi

if step downgrade "a downgrade under load loses nothing"; then
	under_load must b apt-get install -y --allow-downgrades --no-install-recommends /srv/first.deb | tail -n 3
	[ "$(must b "dpkg-query -Wf '\${Version}\\n' waystamp")" = 1.0 ] || fail "b has another version"
	download
	# What follows is of this version.
	must b apt-get install -y --no-install-recommends /srv/second.deb >/dev/null
	download
fi

if step rootless "the agent without root"; then
	runs_as() {
		local who
		who=$(must b 'ps -o user= -p $(systemctl show -P MainPID waystamp-agent@b)')
		[ "$who" = "$1" ] || fail "it runs as $who, not as $1"
		must b "[ -d $2/b ] && [ ! -e $3/b ]" || fail "the pins are not in $2 alone"
	}
	under_load does b install.md "Without root" 1
	runs_as waystamp /run/waystamp-bpf /sys/fs/bpf/waystamp
	under_load does b install.md "Without root" 2
	runs_as root /sys/fs/bpf/waystamp /run/waystamp-bpf
	does b install.md "Without root" 1
	runs_as waystamp /run/waystamp-bpf /sys/fs/bpf/waystamp
	download
fi

if step reboot "a reboot of b and of c"; then
	reboot_of() {
		local before
		before=$(on $1 cat /proc/sys/kernel/random/boot_id)
		must $1 'systemd-run --on-active=2 systemctl reboot' >/dev/null
		rebooted() { local now; now=$(on $1 cat /proc/sys/kernel/random/boot_id) && [ -n "$now" ] && [ "$now" != "$before" ]; }
		until_true 900 rebooted $1
		echo "$1 is there again after $(on $1 cut -d. -f1 /proc/uptime) s"
		# The network of this test comes after the boot, and the unit tries again every two seconds.
		until_true 600 on $1 "systemctl is-active waystamp-agent@$1"
		must $1 "journalctl -b -o cat -u guest | grep -m 1 'is up, forwarding'"
		must $1 "journalctl -b -o cat -u guest | grep -q 'is up, forwarding 0'"
		until_true 120 on $1 '[ $(sysctl -n net.ipv6.conf.all.forwarding) = 1 ]'
	}
	each reboot_of b c
	download
fi

if step controller "the controller"; then
	must a "ip address add fd00::1/128 dev lo nodad"
	does a install.md "Start a node" 4
	must a "systemctl is-active waystamp-controller && waystamp get nodes && grep -q . /srv/a.token"
	[ "$(must a 'ps -o user:32= -p $(systemctl show -P MainPID waystamp-controller)')" = waystamp-controller ] || fail "the controller is somebody else's"
	# The nodes get their plans from it, as install.md says; what they had from files goes before. One line, on the node:
	joins='set -e
systemctl stop waystamp-agent@$node
pins=$(ls -d /run/waystamp-bpf/$node 2>/dev/null || true)
waystamp agent --detach --yes --instance $node ${pins:+--pin-dir /run/waystamp-bpf}
rm /etc/waystamp/$node.json
[ $node = a ] || ip route replace fd00::1/128 via fd00:1::a
echo $token | install -m 0600 /dev/stdin /etc/waystamp/$node.token
[ ! -e /etc/systemd/system/waystamp-agent@$node.service.d ] || chown waystamp /etc/waystamp/$node.token
echo "WAYSTAMP_SOURCE=\"--controller [fd00::1]:7443 --join @/etc/waystamp/$node.token\"" >/etc/waystamp/$node.conf
systemctl start --no-block waystamp-agent@$node'
	join() {
		local token
		token=$(must a "waystamp node token $1 2>/dev/null")
		must $1 "node=$1 token=$token; $(tr -s '\n\t' '; ' <<<"$joins")" >/dev/null
	}
	each join a b c
	must a "waystamp apply -f /usr/share/doc/waystamp/examples/minimal.yaml --wait" | tail -n 3
	for n in a b c; do until_true 120 on $n "systemctl is-active waystamp-agent@$n && waystamp status --instance $n"; done
	must a "waystamp get nodes"
	download
	must a "systemctl stop waystamp-controller"
	download # without it
fi

if step removal "removal says what stays, and a purge waits for it"; then
	remove() { must c apt-get remove -y waystamp | grep -q "detach --yes --instance c" || fail "nothing is said of the data path"; }
	under_load remove
	ip netns exec h1 ping -c 2 -W 10 2001:db8:2::2 >/dev/null || fail "the data path did not stay"
	on c dpkg --purge waystamp && fail "it purges what is at work"
	must c "apt-get install -y --no-install-recommends /srv/second.deb && systemctl stop waystamp-agent@c" >/dev/null
	does c install.md Remove 1
	must c "apt-get purge -y waystamp" >/dev/null
	[ -z "$(on c 'ls -d /etc/waystamp /var/lib/waystamp /usr/bin/waystamp 2>/dev/null')" ] || fail "the purge leaves things"
fi

echo "passed $steps"
sleep infinity
