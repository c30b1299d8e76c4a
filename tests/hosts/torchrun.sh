#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torchrun.sh TORCHRUN: runs the torchrun commands of docs/how_to/hosts.md, each on its own host: node1 and node2 are network
# namespaces with separate names and a bridge between them. Uses the switchyard that TORCHRUN's Python imports. Exits with
# status 77 and the reason if this user cannot create such hosts.
set -euo pipefail
torchrun=$(realpath -s "${1:?torchrun.sh TORCHRUN}")
page=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../docs/how_to/hosts.md")

skip() { echo "SKIP: $*"; exit 77; }
if [[ -z ${SWITCHYARD_INSIDE:-} ]]; then
  command -v ip >/dev/null || skip "there is no ip(8)"
  as=(unshare --net --mount)
  [[ $(id -u) == 0 ]] || as+=(--map-root-user)
  "${as[@]}" true 2>/dev/null || skip "this user may not make network namespaces"
  SWITCHYARD_INSIDE=1 exec "${as[@]}" "${BASH_SOURCE[0]}" "$torchrun"
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mount -t tmpfs none /run  # ip(8) keeps namespaces there
{ ip link add bridge type bridge && ip link set bridge up; } 2>/dev/null || skip "ip(8) cannot make a bridge"
for n in 1 2; do
  ip netns add "node$n"
  ip link add "port$n" type veth peer name eth0 netns "node$n"
  ip link set "port$n" master bridge up
  ip -n "node$n" addr add "10.77.0.$n/24" dev eth0
  ip -n "node$n" link set eth0 up
  ip -n "node$n" link set lo up
done
# node1 resolves its own name to loopback, as on Debian.
printf '127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.2 node2\n' >"$folder/hosts1"
printf '127.0.0.1 localhost\n127.0.1.1 node2\n10.77.0.1 node1\n' >"$folder/hosts2"

cat >"$folder/environment.py" <<'END'
import switchyard as sy
group = sy.Group.from_environment(heap_bytes=32 << 20)
assert group.hosts == 2 and group.host == group.rank // 4, repr(group)
assert group.all_gather(bytes([group.rank])) == [bytes([r]) for r in range(8)]
END
cat >"$folder/process_group.py" <<'END'
import torch.distributed as dist
import switchyard as sy
dist.init_process_group("gloo")
group = sy.Group.from_process_group(heap_bytes=32 << 20)
assert group.hosts == 2 and group.host == group.rank // 4, repr(group)
assert group.all_gather(bytes([group.rank])) == [bytes([r]) for r in range(8)]
dist.destroy_process_group()
END

# on N COMMAND: runs COMMAND as node N.
on() {
  ip netns exec "node$1" unshare --uts --mount sh -c \
    "hostname node$1 && mount --bind '$folder/hosts$1' /etc/hosts && exec \"\$@\"" sh "${@:2}"
}
mapfile -t commands < <(grep -E '^torchrun --nnodes 2 .* program\.py$' "$page")
[[ ${#commands[@]} == 2 ]] || { echo "FAIL: the page has ${#commands[@]} such commands, expected 2"; exit 1; }

# try PROGRAM: all processes must succeed.
try() {
  local pids=() n words
  for n in 1 2; do
    read -ra words <<<"${commands[n - 1]}"
    words=("$torchrun" "${words[@]:1:${#words[@]}-2}" "$folder/$1")
    on "$n" timeout 240 "${words[@]}" >"$folder/output$n" 2>&1 &
    pids+=($!)
  done
  for n in 1 2; do wait "${pids[n - 1]}" || { echo "FAIL: $1 on node$n"; cat "$folder/output$n"; exit 1; }; done
}
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0  # gloo would listen at the host's own name, which is loopback
unset SWITCHYARD_HOST SWITCHYARD_STORE SWITCHYARD_JOB_TOKEN
try process_group.py
SWITCHYARD_JOB_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export SWITCHYARD_JOB_TOKEN
try environment.py
echo "PASS: eight ranks on two hosts, by a token and by a process group"
