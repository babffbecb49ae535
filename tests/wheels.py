"""A package index in a folder, with wheels that tests make."""

from __future__ import annotations

import hashlib
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


def add_source(index: Path, name: str, version: str) -> None:
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}-{version}.tar.gz").write_bytes(b"not read by anybody")
    _list(folder)


def _list(folder: Path) -> None:
    links = (
        f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
        for path in sorted(folder.iterdir())
        if path.name != "index.html"
    )
    (folder / "index.html").write_text("<!DOCTYPE html><body>" + "\n".join(links))
