"""``make demo`` as users run it, while their shell has the keys of another store and a proxy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from thaw.dev.known_answers import FRANCE, ITALY


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_the_demo_streams_paris_explains_the_cold_start_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("THAW_STATE_DIR", "WSK_CONFIG_FILE")}
    environ |= {
        "AWS_ACCESS_KEY_ID": "of another store",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_SESSION_TOKEN": "x",
        "AWS_PROFILE": "of nobody",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-m", "thaw.dev.demo"],
        env=environ | {"TMPDIR": str(tmp_path)},
        text=True,
        capture_output=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert FRANCE.text in done.stdout
    assert ITALY.text in done.stdout
    fetched = re.search(r"bytes fetched  (\d+) of the model's (\d+)", done.stdout)
    assert fetched is not None
    assert fetched[1] == fetched[2]
    assert "\nbound: " in done.stdout
    assert "\npredicted: " in done.stdout
    assert "the demo passed" in done.stdout
    assert list(tmp_path.iterdir()) == []
