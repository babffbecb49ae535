#!/usr/bin/env bash
# Check everything about the native library that needs a GPU, in less than ten minutes: build the library, run its tests
# with the fake driver, then probe and check the real driver.  The last line is JSON.  Without a GPU the probe uses the
# fake driver and says so.  See docs/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
[ -x "$python" ] || { echo "gpu_check: make setup first" >&2; exit 1; }
make -s -C csrc all fake
make -s -C csrc check | tail -n 1
exec "$python" -m thaw_runtime.gpu_check "$@"
