#!/usr/bin/env bash
# Build Thaw's images:   scripts/images.sh [gateway invoker fetchd python vllm-cpu vllm-gpu]
#
# Without names it builds all but vllm-gpu.  Tags: ${THAW_IMAGE_PREFIX:-thaw}/NAME:${THAW_VERSION:-0.1.0}.
# BUILD_NETWORK is the network of the build steps.  It is host by default: the steps fetch packages, and an engine
# without a bridge has no other network.  Where PIP_FIND_LINKS names a folder, its wheels are served to the build, so
# that PyTorch's own index is not needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prefix=${THAW_IMAGE_PREFIX:-thaw}
version=${THAW_VERSION:-0.1.0}
names=("$@")
[ ${#names[@]} -gt 0 ] || names=(gateway invoker fetchd python vllm-cpu)
export DOCKER_BUILDKIT=${DOCKER_BUILDKIT:-0}     # the classic builder is in every engine, and it is the tested one
python=.venv/bin/python
[ -x "$python" ] || python=python3

served=
log=$(mktemp)
clean_up() {
    [ -z "$served" ] || kill "$served" 2>/dev/null || true
    rm -f "$log"
}
trap clean_up EXIT

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

build() {   # tag, Dockerfile, further arguments
    local tag=$1 file=$2 began=$SECONDS
    shift 2
    [ -z "${PYTHON_IMAGE:-}" ] || set -- "$@" --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE"
    echo "images: building $tag${note:+ ($note)}"
    if ! docker build --network "${BUILD_NETWORK:-host}" -f "deploy/images/$file" -t "$tag" "$@" . >"$log" 2>&1; then
        tail -40 "$log" >&2
        echo "images: $tag could not be built; see above" >&2
        exit 1
    fi
    echo "images: $tag in $((SECONDS - began)) s"
}

# All images are based on it.  Check it first, because the engine's own error does not say what to do without a registry.
base=${PYTHON_IMAGE:-python:3.11.14-slim-bookworm}
need_base() {
    docker image inspect "$base" >/dev/null 2>&1 || docker pull -q "$base" >"$log" 2>&1 || {
        tail -3 "$log" >&2
        printf 'images: %s\n' "the engine has no image $base and cannot pull it; see above" \
            "hint: without a registry: make stand-ins (docs/docker.md, Without a registry), then this again" \
            "hint: from a mirror: PYTHON_IMAGE=mirror.example/python:3.11.14-slim-bookworm make images" >&2
        exit 1
    }
}

# The large layer.  Its key consists of its base and the locks alone, independent of the prefix: a build argument would
# be a part of the builder's own key.
dependencies() {
    local hash address=${WHEELHOUSE:-}
    hash=$({ cat deps/tools.lock deps/runtime-cpu.lock deploy/images/vllm-cpu/deps.Dockerfile; echo "${PYTHON_IMAGE:-}"; } |
        sha256sum | cut -c1-12)
    deps_image=thaw/vllm-cpu-deps:$hash
    ! docker image inspect "$deps_image" >/dev/null 2>&1 || return 0
    [ -n "$address" ] || wheelhouse
    note="1 GB to download, some minutes; once for these locks" build "$deps_image" vllm-cpu/deps.Dockerfile ${address:+--build-arg "WHEELHOUSE=$address"}
}

# Compile the library here: in the image, a compiler would be the largest part.  The image's build tests the library.
native_library() {
    command -v "${CXX:-g++}" >/dev/null && command -v make >/dev/null || {
        echo "images: the vLLM images carry the native library (csrc/): apt-get install -y g++ make" >&2
        exit 1
    }
    make -s -j2 -C csrc all
}

need_base
for name in "${names[@]}"; do
    [[ $name != vllm-* ]] || native_library
    if [ "$name" = vllm-cpu ]; then
        dependencies
        build "$prefix/$name:$version" "$name/Dockerfile" --build-arg "DEPS_IMAGE=$deps_image"
    else
        build "$prefix/$name:$version" "$name/Dockerfile"
    fi
done
