"""The native tests, built and run with AddressSanitizer and UBSan.  The full suite also runs the thread sanitizer.

They check the C++ reader of control pages with tests/vectors, run the parameter manager with a fake CUDA driver, and
fuzz the reader.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")


def make(flavour: str, target: str, n_fuzz: int) -> str:
    command = ["make", "-s", "-j2", "-C", str(ROOT / "csrc"), f"FLAVOUR={flavour}", target]
    environment = {**os.environ, "THAW_FUZZ_ITERATIONS": str(n_fuzz)}
    environment.pop("LD_PRELOAD", None)  # an engine sets it for its children, but a sanitizer has to be loaded first
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@compiler
@pytest.mark.of("native")
def test_the_native_tests_pass_under_the_address_sanitizer() -> None:
    assert " passed" in make("asan", "check", 2000).splitlines()[-1]


@pytest.mark.full
@compiler
@pytest.mark.parametrize("flavour", ["plain", "asan", "tsan"])
def test_the_native_tests_pass(flavour: str) -> None:
    assert " passed" in make(flavour, "check", 100_000).splitlines()[-1]
