"""Images of the third-party servers that the compose file names (scripts/stand_ins.py), on the tests' engine."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.docker.engine import ROOT

VALKEY, SEAWEEDFS, NGINX = "valkey/valkey:8.1", "chrislusf/seaweedfs:4.48", "nginx:1.27"


def build(env: dict[str, str], *names: str) -> None:
    """Unless the engine has images of these names.  Without ``names`` those of the compose file."""
    command = [sys.executable, str(ROOT / "scripts/stand_ins.py"), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def nginx() -> str:
    """This machine's; .ci/run installs it."""
    found = shutil.which("nginx")
    assert found is not None, "these tests need nginx: apt-get install -y nginx-light"
    return found
