#!/usr/bin/env bash
# Build Thaw's images:   scripts/images.sh [gateway invoker fetchd python vllm-cpu vllm-gpu]
#
# Without names: all but vllm-gpu.  Tags: ${THAW_IMAGE_PREFIX:-thaw}/NAME:${THAW_VERSION:-0.1.0}.  BUILD_NETWORK is the
# network of the build's own steps (default host: they fetch packages, and an engine without a bridge has no other).
# Where PIP_FIND_LINKS names a folder, its wheels are served to the build, so that no index of PyTorch's is needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prefix=${THAW_IMAGE_PREFIX:-thaw}
version=${THAW_VERSION:-0.1.0}
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(gateway invoker fetchd python vllm-cpu)
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0}     # the classic builder is in every engine
python=.venv/bin/python
[ -x "$python" ] || python=python3

served=
stop_serving() { [ -z "$served" ] || kill "$served" 2>/dev/null || true; }
trap stop_serving EXIT

wheelhouse() {
    local folder
    for folder in ${PIP_FIND_LINKS:-}; do
        [ -d "$folder" ] || continue
        coproc SERVER { exec "$python" -u -m http.server --bind 127.0.0.1 --directory "$folder" 0 2>/dev/null; }
        served=$SERVER_PID
        local line
        read -r line <&"${SERVER[0]}"            # Serving HTTP on 127.0.0.1 port N (http://127.0.0.1:N/) ...
        address=$(sed 's/.*(\(.*\)).*/\1/' <<<"$line")
        return
    done
}

for name in "${names[@]}"; do
    arguments=(--network "${BUILD_NETWORK:-host}" -f "deploy/images/$name/Dockerfile" -t "$prefix/$name:$version")
    [ -z "${PYTHON_IMAGE:-}" ] || arguments+=(--build-arg "PYTHON_IMAGE=$PYTHON_IMAGE")
    if [ "$name" = vllm-cpu ]; then
        address=${WHEELHOUSE:-}
        [ -n "$address" ] || wheelhouse
        [ -z "$address" ] || arguments+=(--build-arg "WHEELHOUSE=$address")
    fi
    began=$SECONDS
    docker build --quiet "${arguments[@]}" . >/dev/null
    echo "images: $prefix/$name:$version in $((SECONDS - began)) s"
done
