"""The container beside that of a user's image: it makes the socket and forwards the requests that come through it.

It joins the network of the image's container, which has no interface but loopback, and has what every container of a
function has: a uid of its own, no capability, the list of system calls, a read-only root, limits.  The image's
container has no mount at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from invoker.drivers.confined import Limits
from invoker.drivers.docker import seccomp
from invoker.drivers.docker import spec as docker_spec
from invoker.drivers.docker.client import Engine
from invoker.drivers.docker.images import ImageStore
from invoker.drivers.docker.spec import Asked, Mounts
from thaw.action import KIND_PYTHON
from thaw.errors import PlatformError

CONTAINER: Final = "thaw.container"
UID: Final = "thaw.uid"
PORT_OF: Final = "thaw.port-of"
"""The label with its owner.  The container has no label of an instance, so it is not taken for one."""
_SUFFIX: Final = "-port"
_PIDS: Final = 512  # a thread for each request in flight


class Ports:
    def __init__(
        self, engine: Engine, images: ImageStore, limits: Limits, owner: str, take_uid: Callable[[str], int]
    ) -> None:
        self._engine, self._images, self._owner, self._take_uid = engine, images, owner, take_uid
        self._limits = replace(limits, pids=_PIDS, tmp_mb=1)

    def open(self, name: str, container_id: str, io: str) -> None:
        """``name``: of the image's container, which was started; ``io``: the folder of the socket on the engine's
        machine.  An image whose program has ended already has no network to join, and its end is the error."""
        uid, image = self._take_uid(port_id(container_id)), self._images.of_kind(KIND_PYTHON)
        labels = {PORT_OF: self._owner, CONTAINER: container_id, UID: str(uid)}
        asked = Asked(image, labels, Mounts(io), self._limits, uid, seccomp.profile())
        body = docker_spec.port_config(name, asked)
        try:
            self._images.creating(image, lambda: self._engine.create(name + _SUFFIX, body))
            self._engine.start(name + _SUFFIX)
        except PlatformError:
            if self._engine.inspect(name).running:
                raise

    def remove(self, name: str) -> None:
        self._engine.remove(name + _SUFFIX)

    def end_others(self, names: Collection[str]) -> None:
        """Remove those whose image's container is none of these."""
        for seen in self._engine.list(f"{PORT_OF}={self._owner}"):
            if seen.name.removesuffix(_SUFFIX) not in names:
                self._engine.remove(seen.name)


def port_id(container_id: str) -> str:
    """Under which its uid is noted."""
    return container_id + _SUFFIX
