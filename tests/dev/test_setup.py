"""scripts/setup.sh: the interpreter with which .venv is made."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SETUP = Path(__file__).parents[2] / "scripts/setup.sh"
INTERPRETER = """#!/bin/sh
case $1-$2 in
    -c-*) echo {version} ;;
    -m-venv) rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
esac
"""


def make_venv(venv: Path, version: str) -> None:
    """Make the environment as the script does, but install nothing."""
    python = venv.with_name(f"python{version}")
    python.write_text(INTERPRETER.format(version=version))
    python.chmod(0o755)
    functions = re.findall(r"^(?:interpreter|make_venv)\(\) \{.*?\}$", SETUP.read_text(), re.M | re.S)
    script = "\n".join(["set -euo pipefail", "venv=$1", "say() { :; }", *functions, 'make_venv "$2"'])
    subprocess.run(["bash", "-c", script, "bash", venv, python], check=True, timeout=60)


def test_an_environment_is_kept_for_the_same_interpreter_and_made_anew_for_another(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    make_venv(venv, "3.12")
    installed = venv / "installed"
    installed.touch()
    make_venv(venv, "3.12")
    assert installed.exists()
    make_venv(venv, "3.11")
    assert not installed.exists()
