"""The packages of docs/extending.md, installed for one test: in this process and in those that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extending.packages import ROOT, on_page


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the installed packages."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    packages = on_page().values()
    for package in packages:
        package.install(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, ROOT, ROOT / "runtime-python"))))
    yield directory
    for package in packages:
        sys.modules.pop(package.module, None)
