"""Checks a function's ``requirements.txt``: names of packages, versions and markers are allowed, nothing else.  Pure.

With an option (``--index-url``), a URL, a path or a VCS requirement, a user could choose the servers that the host
connects to, or the code that it runs.  The other lines are PEP 508's; the installer decides their exact meaning.
"""

from __future__ import annotations

import re
from typing import Final

from thaw.errors import BadRequest

MOST_PACKAGES: Final = 200
MOST_BYTES: Final = 128 * 1024
"""The lines of one function take at most this much of its action.  One with all hashes of a large package has 6 KiB."""
_MOST_CHARACTERS: Final = 1000
"""The longest line without its hashes."""
_HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EXTRAS: Final = re.compile(r"\[[A-Za-z0-9._, -]{0,200}\]")
_VERSION: Final = re.compile(r"(?:===|~=|==|!=|<=|>=|<|>) ?[A-Za-z0-9.*+!_-]{1,128}")
_MARKER: Final = re.compile(r"""[A-Za-z0-9_ .,'"<>=!~()*+-]{1,500}""")


def parse(text: str) -> tuple[str, ...]:
    """The requirements, one a line, each followed by its hashes.  Raises BadRequest with the line's number."""
    found: list[str] = []
    begun, first = "", 0
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        plain = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].strip()
        first = first if begun else number
        if plain.endswith("\\"):
            begun += plain[:-1].strip() + " "
            continue
        whole, begun = (begun + plain).strip(), ""
        if whole:
            found.append(_checked(whole, first))
            if len(found) > MOST_PACKAGES:
                raise BadRequest(f"requirements.txt asks for more than {MOST_PACKAGES} packages.")
    if begun:
        raise BadRequest(f"requirements.txt, line {first}: the line does not end.")
    return bounded(tuple(found))


def bounded(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The same lines.  Raises BadRequest when they are too long to be kept."""
    n_bytes = sum(len(line) + 1 for line in lines)
    if n_bytes > MOST_BYTES:
        raise BadRequest(
            f"requirements.txt needs {n_bytes} bytes with its hashes, more than {MOST_BYTES}.",
            hint="bring the packages in the zip's folder virtualenv (docs/functions.md)",
        )
    return lines


def are_locked(lines: tuple[str, ...]) -> bool:
    """Whether the lines say exactly which files are installed.  Raises BadRequest when some do and some do not, because
    the hashes would then protect nothing."""
    n_hashed = sum(_HASH.search(line) is not None for line in lines)
    if 0 < n_hashed < len(lines):
        missing = next(line for line in lines if _HASH.search(line) is None)
        raise BadRequest(f"requirements.txt has hashes, but none for {missing:.100}: give all lines hashes, or none.")
    return n_hashed > 0


def without_hashes(line: str) -> str:
    return line.partition(" --hash=")[0]


def _checked(line: str, number: int) -> str:
    words = line.split()
    hashes = [word for word in words if word.startswith("--hash=")]
    plain = " ".join(word for word in words if not word.startswith("--hash="))
    where = f"requirements.txt, line {number}"
    if plain.startswith("-"):
        raise BadRequest(
            f"{where}: options are not taken here: {plain:.100}",
            hint="the operator says which package index is used (THAW_PACKAGE_INDEX)",
        )
    wrong = next((word for word in hashes if _HASH.fullmatch(word) is None), "")
    if wrong:
        raise BadRequest(f"{where}: a hash must be --hash=sha256:… with 64 hexadecimal digits, not {wrong:.100}")
    if len(plain) > _MOST_CHARACTERS or not _is_requirement(plain):
        raise BadRequest(
            f"{where}: this is no name of a package with versions: {plain:.100}",
            hint="only packages of the index are installed, by name: no URLs, paths or version control",
        )
    return " ".join((plain, *hashes))


def _is_requirement(plain: str) -> bool:
    head, semicolon, marker = plain.partition(";")
    if semicolon and _MARKER.fullmatch(marker.strip()) is None:
        return False
    name = _NAME.match(head)
    if name is None:
        return False
    rest = head[name.end() :].strip()
    if extras := _EXTRAS.match(rest):
        rest = rest[extras.end() :].strip()
    if rest.startswith("(") and rest.endswith(")"):
        rest = rest[1:-1].strip()
    return not rest or all(_VERSION.fullmatch(part.strip()) for part in rest.split(","))
