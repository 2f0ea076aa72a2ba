#!/usr/bin/env bash
# Two hosts on one Linux machine: network namespaces with addresses of their own, joined by a cable.
# As root: two_hosts.sh WORDS…, which each host gives to torchrun, one process a host.
set -euo pipefail
first="clearhead-$$-a" second="clearhead-$$-b"
trap 'ip netns del "$first" 2> /dev/null || true; ip netns del "$second" 2> /dev/null || true' EXIT
ip netns add "$first"
ip netns add "$second"
ip link add cable netns "$first" type veth peer name cable netns "$second"
for host in "$first 10.99.0.1" "$second 10.99.0.2"; do
    read -r name address <<< "$host"
    ip -n "$name" addr add "$address/24" dev cable
    ip -n "$name" link set cable up
    ip -n "$name" link set lo up
done
host() {
    ip netns exec "$1" env GLOO_SOCKET_IFNAME=cable "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes 2 --node-rank "$2" --nproc-per-node 1 --master-addr 10.99.0.1 --master-port 29500 "${@:3}"
}
host "$second" 1 "$@" &
host "$first" 0 "$@"
wait $!
