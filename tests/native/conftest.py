"""The native library and the fake driver, which are built once.  Without a compiler their tests are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from thaw_runtime.weights import native_library
from thaw_runtime.weights.native_library import Library

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def library() -> Library:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    subprocess.run(["make", "-s", "-j2", "-C", str(ROOT / "csrc"), "all", "fake"], check=True)
    return native_library.find()
