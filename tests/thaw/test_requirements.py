"""The requirements that a requirements.txt may contain."""

from __future__ import annotations

import re

import pytest

from thaw.errors import BadRequest
from thaw.requirements import are_locked, parse, without_hashes

HASH = "--hash=sha256:" + "0" * 64


def test_names_versions_extras_markers_and_hashes_are_taken() -> None:
    text = f"\ufeff# c\nnumpy\nrequests[socks, use_chardet_on_py3] >=2,<3 # why\nx (==1.0)\ny~=1.2 ; python_version<'4'\nz==1 \\\n  {HASH} \\\n  {HASH}\n"
    assert parse(text) == (
        "numpy",
        "requests[socks, use_chardet_on_py3] >=2,<3",
        "x (==1.0)",
        "y~=1.2 ; python_version<'4'",
        f"z==1 {HASH} {HASH}",
    )
    assert without_hashes(f"z==1 {HASH} {HASH}") == "z==1"


REFUSED = """
x @ https://evil.example/x-1.whl | x@file:///etc/passwd | https://evil.example/x.whl | git+https://evil.example/x
./x | ../x.whl | /etc/x.whl | x.whl/../../y | -e . | -r other.txt | --index-url https://evil.example | --find-links=/
x --config-settings=a=b | x --global-option=b | x ; python_version @ '3' | x=1 | x== | x==1, | é | $HOME | ${HOME}
x --hash=md5:00 | x \\
"""
REFUSED_LINES = [line.strip() for line in re.split(r"[|\n]", REFUSED.strip())]
REFUSED_LINES += ["x==1;" + "(" * 1000, "a" * 200_000, "x==" + "1," * 100_000]


@pytest.mark.parametrize("line", REFUSED_LINES, ids=lambda line: line[:40])
def test_everything_else_is_refused(line: str) -> None:
    with pytest.raises(BadRequest):
        parse(line)


def test_hashes_for_some_packages_protect_nothing_and_are_refused() -> None:
    assert not are_locked(parse("a==1\nb==1"))
    assert are_locked(parse(f"a==1 {HASH}\nb==1 {HASH}"))
    with pytest.raises(BadRequest, match="none for b==1"):
        are_locked(parse(f"a==1 {HASH}\nb==1"))


def test_a_function_has_at_most_200_packages() -> None:
    assert len(parse("x\n" * 200)) == 200
    with pytest.raises(BadRequest, match="more than 200"):
        parse("x\n" * 201)
