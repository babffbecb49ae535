"""A package index in a folder, with wheels that tests make."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def add_wheel(
    index: Path, name: str, version: str, files: Mapping[str, bytes | str], requires: Sequence[str] = ()
) -> Path:
    """``files`` are the files of the wheel besides its own metadata."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    whole: dict[str, bytes | str] = {
        **files,
        f"{info}/METADATA": metadata + "".join(f"Requires-Dist: {line}\n" for line in requires),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*whole, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in {**whole, f"{info}/RECORD": record}.items():
            archive.writestr(file, content)
    _list(folder)
    return path


def add_source(index: Path, name: str, version: str, setup: str) -> Path:
    """A package's source, which only its own ``setup.py`` could build."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    path, top = folder / f"{name}-{version}.tar.gz", f"{name}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    backend = '[build-system]\nrequires = []\nbuild-backend = "setup"\nbackend-path = ["."]\n'
    with tarfile.open(path, "w:gz") as archive:
        for file, text in {"PKG-INFO": metadata, "setup.py": setup, "pyproject.toml": backend}.items():
            entry = tarfile.TarInfo(f"{top}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    _list(folder)
    return path


def _list(folder: Path) -> None:
    links = (
        f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
        for path in sorted(folder.iterdir())
        if path.name != "index.html"
    )
    (folder / "index.html").write_text("<!DOCTYPE html><body>" + "\n".join(links))
