"""Clients of other languages: scripts of tests/clients, run with node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def node(script: str, **environ: str) -> Any:
    """Run a script of tests/clients with node, and return the JSON that it prints."""
    packages = ROOT / ".venv" / "clients" / "node_modules"
    assert packages.is_dir(), "the npm clients are missing: apt-get install -y nodejs npm, then make setup-dev"
    env = {"PATH": os.environ["PATH"], "NODE_PATH": str(packages), **environ}
    program = ROOT / "tests" / "clients" / script
    done = subprocess.run(["node", program], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
