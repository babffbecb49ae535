"""The check for GPU machines with the fake driver: it runs to its end, compares bytes, and says that it had no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.usefixtures("library")
def test_the_gpu_check_runs_over_the_fake_driver_and_says_so() -> None:
    command = [sys.executable, "-m", "thaw_runtime.gpu_check", "--fake"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fake"]
    assert found["ok"]
    assert found["load_resident"]["same_bytes"]
    assert found["load_resident"]["registered_bytes"] == found["load_resident"]["n_bytes"]
    assert found["load_arriving"]["bounced_bytes"] > 0
    assert found["kv"]["same_bytes"]
