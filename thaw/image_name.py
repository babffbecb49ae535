"""The name of a container image, as Docker reads it, and which names an operator allows.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from thaw.errors import BadRequest, Forbidden

HUB: Final = "docker.io"
_MOST_CHARACTERS: Final = 255
_PART: Final = re.compile(r"[a-z0-9]+(?:(?:\.|__?|-{1,8})[a-z0-9]+)*")
_HOST: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(?::[0-9]{1,5})?")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ImageName:
    """``repository`` has its registry in front: ``docker.io/library/python``."""

    repository: str
    tag: str
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadRequest."""
        if len(text) > _MOST_CHARACTERS:
            raise _malformed(text)
        name, at, digest = text.partition("@")
        head, slash, rest = name.partition("/")
        if not (slash and ("." in head or ":" in head or head == "localhost")):
            head, rest = HUB, name
        rest, colon, tag = rest.partition(":")
        parts = rest.split("/")
        is_name = _HOST.fullmatch(head) and all(map(_PART.fullmatch, parts))
        is_version = (not colon or _TAG.fullmatch(tag)) and (not at or _DIGEST.fullmatch(digest))
        if not (is_name and is_version):
            raise _malformed(text)
        if head == HUB and len(parts) == 1:
            rest = f"library/{rest}"
        return cls(f"{head}/{rest}", tag or ("" if digest else "latest"), digest)

    def __str__(self) -> str:
        """The name that is pulled.  A digest makes the tag superfluous."""
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"

    def check_allowed(self, prefixes: Sequence[str]) -> None:
        """Raises Forbidden unless one of the prefixes is a part of the name that ends where a word of it does."""
        whole = f"{self.repository}/"
        if not any(whole.startswith(prefix.rstrip("/") + "/") for prefix in prefixes):
            raise Forbidden(
                f"The image {self.repository} may not be run here.",
                hint=f"allowed: {', '.join(prefixes) or 'none'}; the operator names them in THAW_IMAGES",
            )


def _malformed(text: str) -> BadRequest:
    return BadRequest(f"{text!r:.100} is no name of an image", hint="REGISTRY/NAME:TAG or REGISTRY/NAME@sha256:…")
