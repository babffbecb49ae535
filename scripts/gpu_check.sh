#!/usr/bin/env bash
# Everything about the native library that needs a GPU, on a machine that has one, in under ten minutes: builds it, runs
# its tests over the fake driver, then probes and checks the real one.  The last line is JSON.  Without a GPU the
# probe runs over the fake driver and says so.  See docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
[ -x "$python" ] || { echo "gpu_check: make setup first" >&2; exit 1; }
make -s -C csrc all fake
make -s -C csrc check | tail -n 1
exec "$python" -m thaw_runtime.gpu_check "$@"
