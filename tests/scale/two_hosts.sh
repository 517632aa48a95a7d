#!/usr/bin/env bash
# Runs a command once on each of two (or more) "hosts" of this machine, joined by a network of limited bandwidth.
#
#   tests/scale/two_hosts.sh [-n HOSTS] [-r RATE] -- COMMAND [ARGUMENT ...]
#
# A host is a network namespace with one interface, eth0, at 10.77.0.1, 10.77.0.2, ...; a bridge joins them, and each
# sends at RATE at most (tc's units: 1gbit by default, 300mbit, ...).
# COMMAND finds what Lightning's environment asks for: NODE_RANK, LOCAL_RANK=0, MASTER_ADDR, MASTER_PORT, and NNODES for
# its own use; GLOO_SOCKET_IFNAME keeps Gloo off the other interfaces. Host 0's output is shown, the others' goes to
# files that are shown when one of them fails. The exit status is 0 where it is on all hosts.
#
# Needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and the commands ip and tc of iproute2.
set -euo pipefail

usage() { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
fail() { echo "two_hosts.sh: $*" >&2; exit 1; }

hosts=2 rate=1gbit
while getopts n:r:h option; do
    case $option in
    n) hosts=$OPTARG ;;
    r) rate=$OPTARG ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || usage
[[ $hosts =~ ^[0-9]+$ ]] && [ "$hosts" -ge 1 ] && [ "$hosts" -le 250 ] || fail "-n $hosts: give a number of hosts, 1 to 250"
for tool in ip tc; do
    command -v "$tool" >/dev/null || fail "the command '$tool' is missing; install iproute2"
done

work=$(mktemp -d)
prefix=spmd$$
started=()
clean_up() {
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    for name in switch $(seq 0 $((hosts - 1))); do ip netns del "$prefix-$name" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean_up EXIT

inside() { ip netns exec "$prefix-$1" "${@:2}"; }

# The first namespace is the test of the permission for all that follows.
ip netns add "$prefix-switch" 2>"$work/why" ||
    fail "cannot make a network namespace ($(head -1 "$work/why")); run as root, in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN"
inside switch ip link add bridge0 type bridge
inside switch ip link set bridge0 up
for ((host = 0; host < hosts; host++)); do
    ip netns add "$prefix-$host"
    inside switch ip link add "port$host" type veth peer name eth0 netns "$prefix-$host"
    inside switch ip link set "port$host" master bridge0 up
    inside "$host" ip link set lo up
    inside "$host" ip addr add "10.77.0.$((host + 1))/24" dev eth0
    inside "$host" ip link set eth0 up
    # A burst of 256 KiB lets the kernel send its large segments whole; 2 ms of the rate at 1 Gbit/s.
    inside "$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 100ms ||
        fail "-r $rate: tc cannot shape to it (bad rate, or a kernel without tbf)"
done

for ((host = hosts - 1; host >= 0; host--)); do
    variables=(
        "NODE_RANK=$host" "NNODES=$hosts" LOCAL_RANK=0 MASTER_ADDR=10.77.0.1 "MASTER_PORT=${MASTER_PORT:-29517}"
        GLOO_SOCKET_IFNAME=eth0
    )
    if [ "$host" -eq 0 ]; then
        inside "$host" env "${variables[@]}" "$@" &
    else
        inside "$host" env "${variables[@]}" "$@" >"$work/host$host" 2>&1 &
    fi
    started+=($!)
done

# Whichever host fails first ends the others, which would wait for it.
status=0
for ((left = hosts; left > 0; left--)); do
    wait -n || { status=$?; break; }
done
if [ "$status" -ne 0 ]; then
    sleep 5
    for file in "$work"/host*; do
        if [ -s "$file" ]; then echo "::: ${file##*/}" >&2; tail -40 "$file" >&2; fi
    done
fi
exit "$status"
