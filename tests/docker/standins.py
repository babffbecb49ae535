"""Images of the third-party servers that the compose file names (scripts/stand_ins.py), for the tests' engine."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.docker.engine import ROOT

VALKEY, SEAWEEDFS, NGINX = "valkey/valkey:8.1", "chrislusf/seaweedfs:4.48", "nginx:1.27"


def build(env: dict[str, str], *names: str) -> None:
    """Build the images that the engine does not have.  Without ``names``, these are the compose file's images."""
    command = [sys.executable, str(ROOT / "scripts/stand_ins.py"), *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def nginx() -> str:
    """The path of this machine's nginx, which .ci/run installs."""
    found = shutil.which("nginx")
    assert found is not None, "these tests need nginx: apt-get install -y nginx-light"
    return found
