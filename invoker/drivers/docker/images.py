"""The images of an engine: those of the platform by kind, and those that users name, which are pinned by digest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from invoker.drivers.docker.client import Engine, ImageSeen
from invoker.drivers.docker.pulled_images import PulledImages
from invoker.drivers.registry_errors import HINT, why
from thaw.errors import InitFailed, NotFound, PlatformError, Unavailable
from thaw.image_name import ImageName
from thaw.logs import Log


@dataclass(frozen=True, slots=True)
class Images:
    """Images by kind; ``pull_s`` is the longest pull of a missing one, 0 for no pull.  ``most_bytes``: how much of the
    disk the images may have that were pulled for functions."""

    by_kind: Mapping[str, str]
    pull_s: float = 600.0
    most_bytes: int = 20 << 30


class ImageStore:
    def __init__(self, engine: Engine, images: Images, directory: Path, log: Log) -> None:
        """``directory``: where the pulled images are noted."""
        self._engine, self._images = engine, images
        self._pulled = PulledImages(engine, directory, images.most_bytes, log)

    def of_kind(self, kind: str) -> str:
        return self._images.by_kind[kind]

    def pin(self, image: str, deadline_s: float) -> str:
        """A user's image by its digest, which names the same bytes on every host.  An image that is in no registry is
        named by its id, and only hosts of its engine have it.  Raises InitFailed, Unavailable."""
        name = ImageName.parse(image)
        if name.digest:
            self.seen(image)
            return image
        seen = self._newest(image, deadline_s)
        of_registry = (d for d in seen.digests if ImageName.parse(d).repository == name.repository)
        return next(of_registry, f"{name.repository}@{seen.id}")

    def seen(self, image: str) -> tuple[ImageSeen, float]:
        """A pinned image, which is pulled if it is not here, and the seconds of the pull.  Raises InitFailed,
        Unavailable."""
        self._pulled.used(image)
        try:
            return self._here(image), 0.0
        except NotFound:
            began = time.monotonic()
            self._pull(image, self._images.pull_s)
            return self._here(image), time.monotonic() - began

    def creating(self, image: str, create: Callable[[], None]) -> float:
        """Create a container with an image that is pulled if it is missing; return the seconds of the pull."""
        try:
            create()
        except NotFound as e:
            if self._images.pull_s <= 0:
                raise PlatformError(f"the image {image} is not on this host", hint="make images, or docker pull") from e
            began = time.monotonic()
            puller = self._engine if image in self._images.by_kind.values() else self._pulled
            puller.pull(image, self._images.pull_s)
            pulled_s = time.monotonic() - began
            create()
            return pulled_s
        return 0.0

    def _here(self, image: str) -> ImageSeen:
        """Raises NotFound.  The digest of an image that is in no registry is its id."""
        try:
            return self._engine.image(image)
        except NotFound:
            found = self._engine.image(ImageName.parse(image).digest or image)
            if found.digests:  # its id happens to be asked for by another repository's name
                raise
            return found

    def _newest(self, image: str, deadline_s: float) -> ImageSeen:
        """A tag may have moved, so its registry is asked; an image that only this engine has is taken as it is."""
        try:
            self._pull(image, min(deadline_s, self._images.pull_s))
        except InitFailed:
            try:
                found = self._here(image)
            except NotFound:
                found = None
            if found is None or found.digests:
                raise
            return found
        return self._here(image)

    def _pull(self, image: str, patience_s: float) -> None:
        if patience_s <= 0:
            raise InitFailed(f"The image {image} is not on this host.", hint="operators allow pulls: THAW_IMAGE_PULL_S")
        try:
            self._pulled.pull(image, patience_s)
        except Unavailable:
            raise
        except PlatformError as e:
            raise InitFailed(f"The image {image} cannot be pulled: {why(e.message, 'DOCKER_CONFIG')}", hint=HINT) from e
