"""Frameworks, unmodified, against the real processes and the real small model.  `make test-clients` runs this."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.machine import Machine

PYTHON = os.environ.get("THAW_CLIENTS_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="make test-clients installs the frameworks and names their Python"),
]


@pytest.mark.parametrize("name", ["langchain", "instructor", "litellm", "llm"])
def test_a_framework_gets_structured_output_and_tools(platform: Machine, name: str) -> None:
    program = Path(__file__).with_name("frameworks.py")
    command = [PYTHON, str(program), name, f"{platform.url}/v1", ":".join(platform.auth())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=platform.env)
    assert done.returncode == 0, done.stderr[-3000:]
