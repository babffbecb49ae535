"""The digest of a user's image: a pod has the node pull it, and runs nothing of it.

A node says which image it has made a container from, by the digest of its registry.  The pod's program is one that no
image has, so the node makes the container and cannot start it.
"""

from __future__ import annotations

import re
from typing import Final

from invoker.drivers.base import Spec
from invoker.drivers.kubernetes.container import Container
from invoker.drivers.kubernetes.running import await_pulled
from thaw.action import KIND_PYTHON
from thaw.errors import InitFailed
from thaw.ids import random_hex_id
from thaw.image_name import ImageName

_SCHEME: Final = re.compile(r"\A[a-z-]+://")
"""Dockershim's way to say where an image is from: ``docker-pullable://``."""


def needs_pin(image: str) -> bool:
    """A name with a digest needs none: the pods of its starts pull it, and say so if they cannot."""
    return not ImageName.parse(image).digest


def spec_of(image: str) -> Spec:
    """The container that is made and not started."""
    return Spec(f"pin-{random_hex_id()}", KIND_PYTHON, image=image)


def await_pinned(image: str, container: Container, node: str, deadline: float) -> str:
    """The image by its digest, once the node has pulled it.  Raises InitFailed, PlatformError."""
    found = _SCHEME.sub("", await_pulled(container, node, deadline, image))
    digest = found.partition("@")[2]
    if not digest:
        raise InitFailed(
            f"The node has the image {image} without the digest of a registry, so it cannot be pinned.",
            hint="push it to a registry from which every node pulls",
        )
    return f"{ImageName.parse(image).repository}@{digest}"
