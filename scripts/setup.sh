#!/usr/bin/env bash
# Make .venv: everything Thaw needs on this machine, from the locks in deps/.
#
#   scripts/setup.sh run    everything that Thaw needs to run (make demo, make dev)
#   scripts/setup.sh dev    also the packages for tests, lint and type checks
#   scripts/setup.sh bench  also the programs that benchmarks compare Thaw with
#
# The engine is vLLM's CPU build, or its CUDA build where nvidia-smi finds a GPU; THAW_ENGINE=cpu|gpu overrides this.
# The script can be run again at any time.  It ends at once if the stamp is still valid: the stamp is a hash of the
# locks, the interpreter, the platform and this script, and is written last.  Nothing is installed outside .venv.  The
# variable PYTHON chooses the interpreter.  pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf …) are passed on
# to uv, which does not read them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

profile=${1:-run}
engine=${THAW_ENGINE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
venv=$PWD/.venv
declare -A needed_mb=([cpu]=6000 [gpu]=24000)     # with uv's cache; gpu is an estimate, because it was never installed
pytorch_index=https://download.pytorch.org/whl/cpu
case $engine-$profile in
    cpu-run|gpu-run) locks=("deps/$engine.lock") ;;
    cpu-dev|gpu-dev) locks=("deps/$engine.lock" deps/dev.lock) ;;
    cpu-bench|gpu-bench) locks=("deps/$engine.lock" deps/dev.lock deps/bench.lock) ;;
    *) echo "usage: [THAW_ENGINE=cpu|gpu] scripts/setup.sh run|dev|bench" >&2; exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found" "hint: install one (apt-get install python3), or set PYTHON to its path"
}

interpreter() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)'; }

stamp_of() {
    { cat "${locks[@]}" deps/tools.lock pyproject.toml scripts/setup.sh tests/clients/package-lock.json
      command -v npm || true
      interpreter "$1"
      "$1" -c 'import platform; print(platform.platform())'
      echo "$engine $profile $venv"; } | sha256sum | cut -d' ' -f1
}

check_disk() {
    local free_mb
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    local needed=${needed_mb[$engine]}
    [ "$free_mb" -ge "$needed" ] || fail "only $free_mb MB free here, $needed MB needed" "hint: make room, or move the checkout"
}

make_venv() {
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1 &&
        [ "$(interpreter "$venv/bin/python")" = "$(interpreter "$1")" ]; then return; fi
    say "creating .venv with $1"
    "$1" -m venv --clear "$venv" || fail "'$1 -m venv' failed" \
        "hint: apt-get install -y python3-venv    (or python3.11-venv, fitting the interpreter)"
}

# uv does not read pip's configuration, so give it the indexes that pip would use, and pip's rule that the best version
# wins.
pip_setting() { "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true; }
use_pip_settings() {
    local index extra cert
    index=${PIP_INDEX_URL:-$(pip_setting index-url)}
    extra=${PIP_EXTRA_INDEX_URL:-$(pip_setting extra-index-url)}
    cert=${PIP_CERT:-$(pip_setting cert)}
    PIP_FIND_LINKS=${PIP_FIND_LINKS:-$(pip_setting find-links)}
    [ -z "$index" ] || export UV_DEFAULT_INDEX=$index
    [ -z "$extra" ] || export UV_INDEX=$extra
    [ -z "$cert" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$cert}
    export UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
}

install_locked() {
    local links=() lock requirements=()
    if [ "$engine" = cpu ]; then for lock in ${PIP_FIND_LINKS:-}; do links+=(--find-links "$lock"); done; fi
    for lock in "${locks[@]}"; do requirements+=(-r "$lock"); done
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --require-hashes --compile-bytecode \
        "${requirements[@]}" "${links[@]}" "$@"
}

# The library is optional: without it the runtime reads segments in Python.  make does nothing if it is up to date.
build_native() {
    local compiler
    for compiler in "${CXX:-g++}" clang++; do
        if command -v "$compiler" >/dev/null && command -v make >/dev/null; then
            CXX=$compiler make -s -j2 -C csrc all || say "the native library (csrc/) was not built; the runtime works without"
            return
        fi
    done
    [ "${1:-}" = quietly ] || say "no C++ compiler, so no native library; the runtime works without" \
        "(to have it: apt-get install -y g++ make, then make native)"
}

# The clients of other languages that tests drive the gateway with.
install_clients() {
    [ "$profile" != run ] || return 0
    if ! command -v npm >/dev/null; then
        say "no npm, so the tests with the npm clients of OpenWhisk and OpenAI cannot run (to have it: apt-get install -y nodejs npm)"
        return
    fi
    mkdir -p "$venv/clients"
    cp tests/clients/package.json tests/clients/package-lock.json "$venv/clients/"
    npm ci --prefix "$venv/clients" --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null ||
        fail "the npm packages of tests/clients could not be installed" "hint: npm's registry must be reachable (npm config get registry)"
}

refuse_gpu_builds() {
    [ "$engine" = cpu ] || return 0
    "$venv/bin/python" - <<'PY' || fail "a package of the GPU build is installed" "hint: rm -rf .venv and run this again"
import sys
from importlib.metadata import distributions
names = {d.metadata["Name"].lower() for d in distributions()}
wrong = sorted(n for n in names if n.startswith("nvidia-") or n in ("torchvision", "torchaudio"))
sys.exit(f"setup: found {', '.join(wrong)}" if wrong else 0)
PY
}

python=$(find_python)
mkdir -p .cache
exec 9>.cache/setup.lock            # if two makes run at once, the second waits and then finds the stamp
flock -n 9 || { say "another setup is running here; waiting for it"; flock 9; }
stamp_file=$venv/.thaw-stamp-$engine-$profile
stamp=$(stamp_of "$python")
if [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
    build_native quietly
    exit 0
fi

started=$SECONDS
check_disk
make_venv "$python"
use_pip_settings
if [ "$("$venv/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" != "0.13.8" ]; then
    say "fetching uv 0.13.8 (20 MB) from the package index"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r deps/tools.lock
fi
say "fetching and installing $(cat "${locks[@]}" | grep -c '^[a-z0-9].*==') locked packages (torch and vLLM, $engine build; CPU: about 1 GB to download, 3.1 GB on disk)"
if ! install_locked; then
    say "that did not resolve; trying again with PyTorch's public CPU index ($pytorch_index)"
    install_locked --index "$pytorch_index" || fail "the locked packages could not be installed" \
        "hint: the CPU build of torch must be reachable: set PIP_FIND_LINKS to a folder with its wheel" \
        "hint: the lock was made for Python 3.11: set PYTHON=python3.11"
fi
say "installing thaw itself (editable)"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
refuse_gpu_builds
install_clients
build_native
echo "$stamp" >"$stamp_file"
say "done in $((SECONDS - started)) s"
