"""Models on a hub that speaks Hugging Face's API: their URIs, their versions, and the content that two of them share.

::

    hf://org/name             the branch main            a name: it means the newest commit at each start
    hf://org/name@v1.0        a branch, a tag or a ref   a name, too
    hf://org/name@<40 hex>    a commit                   never changes; starts are planned with it

The version of such a model is ``<commit>.<content>``.  ``content`` is a hash over the checksums, lengths and names of
its files as the hub lists them, so commits and repositories with the same files have the same content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from thaw.model_uri import HUB, ModelUri

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository and one of its revisions."""

    repository: str  # org/name
    revision: str

    @staticmethod
    def of(uri: ModelUri) -> HubModel:
        """``uri`` comes from ModelUri.parse and has this scheme."""
        name, revision = uri.path
        return HubModel(f"{uri.place}/{name}", revision[1:])

    @property
    def commit(self) -> str:
        """The commit that the revision names; empty for a name that may move."""
        return self.revision if _COMMIT.fullmatch(self.revision) else ""

    def at(self, commit: str) -> str:
        """The URI of one commit of the repository."""
        return f"{HUB}://{self.repository}@{commit}"

    def __str__(self) -> str:
        return f"{HUB}://{self.repository}@{self.revision}"


def is_hub(uri: str) -> bool:
    return uri[: len(HUB) + 3].lower() == f"{HUB}://"


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def version(commit: str, content: str) -> str:
    return f"{commit}.{content}"


def content_of(uri: str, version: str) -> tuple[str, str]:
    """Return a pair that is equal for two models only if their files are equal.

    A hub itself states the content of each file, and does not state it to a user who may not read the file.  In other
    stores the writer of a model states it, so their models share bytes only with themselves.
    """
    return (HUB, version.partition(".")[2]) if is_hub(uri) else (uri, version)


def place_of_content(uri: str, version: str) -> str:
    """A key by which hosts that may have a model are found: the content of a model on a hub, else its URI, because a
    host may not report which version it has."""
    return "://".join(content_of(uri, version)) if is_hub(uri) else uri


def is_same_content(uri: str, version: str, held_uri: str, held_version: str) -> bool:
    """Whether a host holds the files of a model.  An empty ``held_version``: the host does not report it."""
    return (held_uri == uri and not held_version) or content_of(held_uri, held_version) == content_of(uri, version)
