#!/usr/bin/env bash
# The first process of a node's namespaces; scripts/kubernetes.sh starts it:   node.sh DIRECTORY NAME ADDRESS PODS PROGRAMS BRIDGE
#
# It gives the node file systems of its own at the places that containerd and kubelet write to, waits for its link, and
# starts containerd, kubelet and kube-proxy.  When it is killed, the kernel ends everything in its namespaces.
set -euo pipefail
home=$1 name=$2 address=$3 pods=$4 programs=$5
cluster=$(dirname "$home")
kubeconfig=$cluster/admin.conf
socket=/run/containerd/containerd.sock
PATH=$programs/bin:/usr/sbin:/usr/bin:/sbin:/bin

file_systems() {
    local place setting
    mount --make-rprivate /
    rm -rf "$home/run"     # sockets and pids of a node that was powered off
    mkdir -p "$home"/{run,lib,log,cgroup,settings}
    # sysfs shows the network of the process that mounts it
    mount --rbind /sys/fs/cgroup "$home/cgroup"
    mount -t sysfs sysfs /sys
    mount --rbind "$home/cgroup" /sys/fs/cgroup
    for place in run lib log; do
        case $place in run) mount --bind "$home/run" /run ;; *) mount --bind "$home/$place" "/var/$place" ;; esac
    done
    # kubelet writes these settings of the whole machine: it gets files that have its values
    for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
        [ -e "/proc/sys/${setting%=*}" ] || continue
        place=$home/settings/$(basename "${setting%=*}")
        echo "${setting#*=}" >"$place"
        mount --bind "$place" "/proc/sys/${setting%=*}"
    done
    mount --make-rshared /     # pods may share mounts with the node
    hostname "$name"
}

link() {
    local route
    echo here >"$home/ready"
    grep -q -m1 linked < <(timeout 30 tail -n +1 --retry -f "$home/linked" 2>/dev/null)
    ip link set lo up
    ip addr add "$address/24" dev eth0
    ip link set eth0 up
    ip route add default via "${address%.*}.1"
    while read -r route; do ip route add "${route% *}" via "${route#* }"; done <"$home/routes"
    echo 1 >/proc/sys/net/ipv4/ip_forward
}

settings() {
    mkdir -p "$home"/{cni,manifests,plugins}
    cat >"$home/cni/10-pods.conflist" <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true,
  "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": "$pods"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    # A machine that is a container itself may not lower a process's protection from the OOM killer.
    cat >"$home/containerd.toml" <<END
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "$socket"
[plugins."io.containerd.internal.v1.opt"]
  path = "$home/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "docker.io/thaw/pause:0.1.0"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "$programs/cni"
    conf_dir = "$home/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "$programs/bin/runc"
      SystemdCgroup = false
END
    # Images come from an archive, so none may be collected; a test's machine shares its disk and memory.
    cat >"$home/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: "$cluster/keys/ca.crt"}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /thaw-$name
failSwapOn: false
oomScoreAdj: 0
makeIPTablesUtilChains: false
resolvConf: ""
staticPodPath: "$home/manifests"
volumePluginDir: "$home/plugins"
healthzPort: 0
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
nodeStatusUpdateFrequency: 2s
END
}

file_systems
settings
link
containerd --config "$home/containerd.toml" >"$cluster/log/containerd-$name" 2>&1 &
# kubelet ends if it finds no containerd
grep -q -m1 'containerd successfully booted' < <(timeout 60 tail -n +1 --retry -f "$cluster/log/containerd-$name" 2>/dev/null)
kubelet --config="$home/kubelet.yaml" --kubeconfig="$kubeconfig" --hostname-override="$name" --node-ip="$address" \
    --container-runtime=remote --container-runtime-endpoint="unix://$socket" --pod-infra-container-image=docker.io/thaw/pause:0.1.0 \
    >>"$cluster/log/kubelet-$name" 2>&1 &
# --masquerade-all: an answer comes back through the node, whether or not bridged packets see iptables
kube-proxy --kubeconfig="$kubeconfig" --hostname-override="$name" --proxy-mode=iptables --masquerade-all \
    --conntrack-max-per-core=0 --conntrack-tcp-timeout-established=0 --conntrack-tcp-timeout-close-wait=0 \
    --healthz-bind-address= --metrics-bind-address=127.0.0.1:10249 >>"$cluster/log/kube-proxy-$name" 2>&1 &
# The first process of a namespace adopts the orphans of containers, and reaps them while it waits.
wait
