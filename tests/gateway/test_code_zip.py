"""Packages that a zip needs: it contains them, or it is refused when it is deployed."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import tracemalloc
import zipfile

import pytest

from gateway.api.openwhisk.action_body import new_action
from gateway.api.openwhisk.code_zip import ZipText, decoded_zip, packages_of
from gateway.settings import GatewaySettings
from thaw.action import Action
from thaw.errors import BadRequest
from thaw.ids import ActionName, Namespace
from thaw.settings import load

SETTINGS = load(GatewaySettings, {"THAW_STATE_URL": "redis://x"})
BROUGHT = {"virtualenv/lib/python3.11/site-packages/numpy/__init__.py": ""}


def packed(files: dict[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"__main__.py": "def main(args): return args\n", **files}.items():
            archive.writestr(name, text)
    return data.getvalue()


def deploy(data: bytes) -> Action:
    code = {"kind": "python:3.11", "code": base64.b64encode(data).decode(), "binary": True}
    return new_action(ActionName("guest/f"), Namespace("guest"), {"exec": code}, SETTINGS)


def test_the_packages_that_a_zip_asks_for_and_does_not_bring_are_read() -> None:
    text = "# what I need\n\nnumpy==2.1  # arrays\npandas>=2; python_version >= '3.11'\n"
    assert deploy(packed({"requirements.txt": text})).exec.packages == (
        "numpy==2.1",
        "pandas>=2; python_version >= '3.11'",
    )


def test_a_zip_that_asks_for_another_index_is_refused() -> None:
    with pytest.raises(BadRequest, match="line 1: options are not taken here"):
        deploy(packed({"requirements.txt": "--index-url https://x\nnumpy\n"}))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"requirements.txt": ""},
        {"requirements.txt": "# none\n"},
        {"requirements.txt": "numpy\n", **BROUGHT},
        {"docs/requirements.txt": "sphinx\n"},
        {"notes.txt": "see requirements.txt"},
    ],
)
def test_a_zip_that_needs_nothing_or_brings_it_is_taken(files: dict[str, str]) -> None:
    found = deploy(packed(files)).exec
    assert found.binary
    assert not found.packages


def takes_little_memory(data: io.BytesIO) -> None:
    tracemalloc.start()
    try:
        packages_of(data)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def many_files(n_files: int, comment: bytes, is_64: bool) -> bytes:
    """Return a zip whose directory lists "a" ``n_files`` times, and requirements.txt once.  The zip has none of these
    files."""

    def entry(name: bytes) -> bytes:
        numbers = (20, 0, 20, 0, 0, 0, 0, 0x21, 0, 0, 0, len(name), 0, 0, 0, 0, 0, 0)
        return struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *numbers) + name

    listed = entry(b"a") * n_files + entry(b"requirements.txt")
    begin = b"PK\3\4" + listed
    if not is_64:
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65_535, 65_535, len(listed), 4, min(len(comment), 65_535))
        return begin + end + comment
    n = n_files + 1
    begin += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, n, n, len(listed), 4)
    begin += struct.pack("<4sLQL", b"PK\6\7", 0, 4 + len(listed), 1)
    return begin + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65_535, 65_535, 100, 4, min(len(comment), 65_535)) + comment


@pytest.mark.parametrize("is_64", [False, True])
@pytest.mark.parametrize("comment", [b"", b"c" * 65_535, b"c" * 65_536, b"PK\5\6" + bytes(30)])
def test_a_zip_with_a_list_of_files_without_end_takes_little_memory(comment: bytes, is_64: bool) -> None:
    data = io.BytesIO(many_files(100_000, comment, is_64))
    takes_little_memory(data)


@pytest.mark.parametrize("n_files", [1, 20_000])
def test_a_zip_with_many_files_and_a_comment_is_read(n_files: int) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for i in range(n_files):
            archive.writestr(f"package/module_{i}.py", b"")
        archive.writestr("requirements.txt", "numpy\n")
        archive.comment = b"made by somebody"
    assert packages_of(data) == ("numpy",)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_list_of_packages_that_opens_to_much_takes_little_memory(method: int) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("requirements.txt", b"\n" * 30_000_000)
    takes_little_memory(data)


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_damaged_zip_is_left_to_its_runtime(cut: int) -> None:
    whole = packed({"requirements.txt": "numpy\n"})
    assert deploy(whole[: len(whole) - 1 - cut]).exec.binary
    flipped = bytearray(whole)
    flipped[4 + cut] ^= 0xFF
    with contextlib.suppress(BadRequest):  # the zip may still ask for numpy
        assert deploy(bytes(flipped)).exec.binary


@pytest.mark.parametrize("tail", ["", "=", "==", "===", "A", "A===", "=A", "%", "\n"])
@pytest.mark.parametrize("data", [b"PK", b"PK1", b"PK12", b"PKPKPKPKPKPK" * 9, b"P", b"", b"QK" * 50, b"source"])
def test_a_zip_is_known_in_pieces_as_in_one(data: bytes, tail: str) -> None:
    code = base64.b64encode(data).decode() + tail
    whole = decoded_zip(code)
    for n_chars in (1, 2, 3, 4, 5, 7, 200):
        text = ZipText()
        for begin in range(0, len(code), n_chars):
            text.feed(code[begin : begin + n_chars].encode())
        found = text.end()
        assert (found and found.getvalue()) == (whole and whole.getvalue()), (code, n_chars)
