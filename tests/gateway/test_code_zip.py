"""Packages that a zip needs: it contains them, or it is refused when it is deployed."""

from __future__ import annotations

import base64
import contextlib
import io
import zipfile

import pytest

from gateway.api.action_body import new_action
from gateway.api.code_zip import ZipText, decoded_zip
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


def test_a_zip_that_asks_for_packages_and_brings_none_is_refused_with_the_next_step() -> None:
    text = "# what I need\n\nnumpy==2.1  # arrays\npandas>=2; python_version >= '3.11'\n--index-url https://x\n"
    with pytest.raises(BadRequest) as caught:
        deploy(packed({"requirements.txt": text}))
    assert caught.value.message == (
        "The zip's requirements.txt asks for packages, which are not installed here: numpy==2.1, pandas>=2. Bring them in "
        "the zip (pip install --target virtualenv/lib/python3.11/site-packages -r requirements.txt), or take "
        "requirements.txt out of it when the hosts' image has them (see docs/functions.md)."
    )


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
    assert deploy(packed(files)).exec.binary


def test_a_long_list_is_not_told_whole() -> None:
    with pytest.raises(BadRequest, match=r"p0, p1, p2, p3, p4, …\."):
        deploy(packed({"requirements.txt": "\n".join(f"p{i}" for i in range(1000))}))


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
