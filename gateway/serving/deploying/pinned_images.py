"""The image of a function is pinned when it is deployed: a host pulls it, and the action keeps its digest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.serving.hangup import Hangup
from gateway.serving.routing.invoker_pool import InvokerPool
from relay.protocol.data_port_messages import ImageFound, ImageWanted
from relay.state.registry import Registry
from thaw import wire
from thaw.action import Action
from thaw.errors import BadRequest, DeveloperError, PlatformError, TimeLimitExceeded, Unavailable
from thaw.host import HostReport
from thaw.image_name import ImageName

RUNS_IMAGES: Final = ("docker", "kubernetes")
"""The drivers whose hosts run images of users."""
_ASKED: Final = 2
_MOST_BYTES: Final = 16 * 1024


class PinnedImages:
    def __init__(self, registry: Registry, pool: InvokerPool, allowed: Sequence[str], deadline_s: float) -> None:
        """``allowed``: prefixes of the names that every namespace may run."""
        self._registry, self._pool = registry, pool
        self._allowed, self._deadline_s = allowed, deadline_s

    def pinned(self, action: Action) -> Action:
        """The action with its image's digest.  Raises Forbidden, BadRequest when no host can run or pull it,
        Unavailable."""
        if not action.exec.image:
            return action
        image = ImageName.parse(action.exec.image)
        image.check_allowed(self._allowed)
        found = self._found(str(image))
        return replace(action, exec=replace(action.exec, image=found))

    def _found(self, image: str) -> str:
        ends_s = time.monotonic() + self._deadline_s
        why = "the platform has no host"
        for host in self._hosts()[:_ASKED]:
            try:
                return self._asked(host.address, image, ends_s)
            except DeveloperError as e:
                if not isinstance(e, TimeLimitExceeded):
                    raise BadRequest(e.message, hint=e.hint) from e
                why = f"it was not pulled within {self._deadline_s:g} s (THAW_IMAGE_DEPLOY_S), and is still on its way"
            except PlatformError as e:
                why = e.message
        raise Unavailable(f"The image {image} cannot be looked at now: {why}", hint="deploy it again in a while")

    def _hosts(self) -> list[HostReport]:
        """Raises BadRequest when there are hosts, and none runs images."""
        live = sorted((r for r in self._registry.live_hosts() if r.takes_starts), key=lambda r: r.host_id)
        able = [report for report in live if report.driver in RUNS_IMAGES]
        if live and not able:
            raise BadRequest(
                "No host of this platform runs images: kind 'blackbox' needs hosts with THAW_DRIVER=docker or "
                "THAW_DRIVER=kubernetes.",
                hint="deploy the code as kind python:3.11, or start the platform with thaw dev up --driver docker",
            )
        return able

    def _asked(self, address: str, image: str, ends_s: float) -> str:
        left_ms = max(1, round(1000 * (ends_s - time.monotonic())))
        body = wire.dumps(ImageWanted(image, left_ms))
        reply = self._pool.post(address, "/image", body, stream=False, deadline_s=ends_s, hangup=Hangup())
        reply.read_head()
        return wire.from_plain(ImageFound, reply.read_json(max_bytes=_MOST_BYTES)).image
