"""The interpreter with which scripts/setup.sh makes .venv, and the system's packages that the tests need."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


TOOLS = ("make", "g++", "dockerd", "iptables", "busybox", "docker-registry", "nginx", "openssl")
MORE_TOOLS = ("ip", "tc", "node", "npm", "curl")


def system_packages(bin_: Path, *without: str, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/system_packages.sh where only these programs are on the path.  ``programs``: further shell scripts."""
    bin_.mkdir()
    for name in ("sort", "env", "true"):
        (bin_ / name).symlink_to(str(shutil.which(name)))
    (bin_ / "python3").symlink_to(sys.executable)
    made = {**dict.fromkeys({*TOOLS, *MORE_TOOLS} - set(without), ""), "id": "echo 0", **programs}
    for name, code in made.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{code}\n")
        (bin_ / name).chmod(0o755)
    script = SETUP.with_name("system_packages.sh")
    return subprocess.run(
        ["/bin/bash", script], env={"PATH": str(bin_)}, capture_output=True, text=True, timeout=60, check=False
    )


def test_where_nothing_is_missing_nothing_is_installed(tmp_path: Path) -> None:
    done = system_packages(tmp_path / "bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_missing_is_said_and_then_installed(tmp_path: Path) -> None:
    done = system_packages(tmp_path / "bin", "nginx", "ip", "tc", **{"apt-get": 'echo "apt-get $*"'})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "setup: installing Debian packages that the tests need: iproute2 nginx-light",
        "apt-get update -q",
        "apt-get install -y -q --no-install-recommends iproute2 nginx-light",
    ]


@pytest.mark.parametrize(
    "programs", [{}, {"apt-get": "exit 9", "id": "echo 1000", "sudo": "exit 1"}], ids=["no apt", "no sudo"]
)
def test_where_nothing_may_be_installed_one_line_says_what_would(tmp_path: Path, programs: dict[str, str]) -> None:
    done = system_packages(tmp_path / "bin", "curl", **programs)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "setup: the tests need curl, which cannot be installed from here",
        "hint: sudo apt-get update && sudo apt-get install -y -q --no-install-recommends curl",
    ]
