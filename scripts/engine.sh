#!/usr/bin/env bash
# A container engine that belongs to this checkout, for tests and trials on a machine where no engine runs.
#
#   scripts/engine.sh up      start it (install it where it is missing, as root) and print its DOCKER_HOST
#   scripts/engine.sh down    end it and remove everything that it had
#   scripts/engine.sh fresh   as up; where none runs, first remove what an engine that was killed has left
#   scripts/engine.sh crash   kill -9 the daemon; its containers keep running, and `up` starts the daemon again
#   scripts/engine.sh stop    end the daemon as a machine's shutdown does, and print the seconds that this took
#
# The engine does not touch the rest of the machine: it has a private socket and data root in $THAW_ENGINE_DIR (default
# /var/tmp/thaw-engine), no bridge and no iptables rules.  (Otherwise a second daemon would delete the bridge of the
# machine's own daemon, and any daemon would make the machine drop forwarded packets.)  Functions have no network
# anyway; a compose project still gets its own bridge.  With live-restore a container outlives the daemon: this is how a
# production engine should be set up for Thaw.  THAW_ENGINE_LIVE_RESTORE=false starts an engine that ends the containers
# that it finds, as Docker does by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=${THAW_ENGINE_DIR:-/var/tmp/thaw-engine}
socket=$home/docker.sock

say() { printf 'engine: %s\n' "$*" >&2; }
fail() { printf 'engine: %s\n' "$@" >&2; exit 1; }

install() {
    local missing=()
    command -v dockerd >/dev/null || missing+=(docker.io iptables)
    command -v busybox >/dev/null || missing+=(busybox-static)
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || fail "no dockerd here" "hint: install Docker, start it, and set DOCKER_HOST"
    say "installing ${missing[*]}"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"; } >&2 ||
        fail "could not install ${missing[*]}" "hint: install Docker, start it, and set DOCKER_HOST"
}

answers() { DOCKER_HOST=unix://$socket timeout 10 docker version >/dev/null 2>&1; }

# An engine's containerd ends with it, but a moment later.  A new engine would take it for its own and wait in vain.
await_end_of_containerd() {
    local file=$home/exec/containerd/containerd.pid pid
    [ -s "$file" ] || return 0
    pid=$(cat "$file")
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = containerd ] || return 0
    timeout 30 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
}

up() {
    if answers; then echo "unix://$socket"; return; fi
    [ "$(id -u)" -eq 0 ] || fail "starting an engine needs root" "hint: start Docker yourself and set DOCKER_HOST"
    install
    mkdir -p "$home"
    chmod 0711 "$home"
    mkdir -p "$home/exec" "$home/data"
    await_end_of_containerd
    : >"$home/log"
    # 9>&-: a lock that the caller holds must not live on in the daemon
    setsid dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$home/pid" --host "unix://$socket" \
        --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --bridge=none \
        --live-restore="${THAW_ENGINE_LIVE_RESTORE:-true}" \
        >>"$home/log" 2>&1 </dev/null 9>&- &
    local pid=$!
    # the daemon answers only after it has written this line to its log
    timeout 60 tail --pid="$pid" -n +1 -F "$home/log" 2>/dev/null | grep -q -m1 "API listen on $socket" || true
    answers || fail "the engine did not start; the end of $home/log:" "$(tail -3 "$home/log")"
    echo "unix://$socket"
}

crash() {
    local pid
    pid=$(cat "$home/pid") && kill -9 "$pid" && timeout 10 tail --pid="$pid" -f /dev/null
    rm -f "$home/pid"     # the socket stays, as after a real crash
}

stop() {
    local pid began=$EPOCHREALTIME
    pid=$(cat "$home/pid") && kill "$pid" && timeout 120 tail --pid="$pid" -f /dev/null
    awk -v began="$began" -v ended="$EPOCHREALTIME" 'BEGIN { printf "%.1f\n", ended - began }'
}

down() {
    if answers; then
        local left
        left=$(DOCKER_HOST=unix://$socket docker ps -aq)
        # shellcheck disable=SC2086  a list of ids
        [ -z "$left" ] || DOCKER_HOST=unix://$socket docker rm -f $left >/dev/null
    fi
    if [ -s "$home/pid" ]; then
        local pid
        pid=$(cat "$home/pid")
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ]; then
            kill "$pid"
            timeout 30 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
        fi
    fi
    # containerd ends with its daemon, unless the daemon was killed
    local containerd=$home/exec/containerd/containerd.pid
    if [ -s "$containerd" ]; then kill "$(cat "$containerd")" 2>/dev/null && timeout 10 tail --pid="$(cat "$containerd")" -f /dev/null || true; fi
    local mounted
    for mounted in $(awk -v home="$home/" 'index($2, home) == 1 { print $2 }' /proc/mounts | sort -r); do umount -l "$mounted"; done
    rm -rf "$home"
}

# A layer that was being made when an engine was killed fails every container of its image later.
fresh() {
    answers || down
    up
}

case ${1:-} in
    up|down|fresh|crash|stop) "$1" ;;
    *) echo "usage: scripts/engine.sh up|down|fresh|crash|stop" >&2; exit 2 ;;
esac
