"""How long a start waited for the image of its pod: the longest cold start, the first of an image on a node.

A pod's status does not tell it; the node notes it as an event ``Pulled`` of the pod.  Only a start that was slow asks.
"""

from __future__ import annotations

import re
import threading
from typing import Final

from invoker.drivers.kubernetes.client import Cluster
from thaw.errors import PlatformError

_SLOW_S: Final = 2.5
"""A pod whose image is there runs within two seconds; an image of gigabytes takes minutes."""
_ANSWERED_S: Final = 0.1
"""The question is as old as the container's own start, and its answer takes milliseconds."""
_TIME: Final = r"(?:\d+(?:\.\d+)?(?:h|ms|m|s|us|µs|ns))+(?!\w)"
_PULLED: Final = re.compile(rf"\ASuccessfully pulled image .* in ({_TIME})(?: \(({_TIME}) including waiting\))?")
_PART: Final = re.compile(r"([0-9.]+)(h|ms|m|s|us|µs|ns)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class Pull:
    """The node's report about the pull of a pod's image, requested on a thread beside the rest of the start."""

    def __init__(self, cluster: Cluster, uid: str, start_s: float) -> None:
        """``start_s``: the time until the pod ran.  A pull took no longer."""
        self._cluster, self._uid, self._start_s = cluster, uid, start_s
        self._said_s = 0.0
        self._answered = threading.Event()
        if start_s >= _SLOW_S:
            threading.Thread(target=self._ask, name="image-pull", daemon=True).start()
        else:
            self._answered.set()

    def seconds(self) -> float:
        """0 if the image was there, or the cluster does not say, or has not said yet."""
        self._answered.wait(_ANSWERED_S)
        return self._said_s

    def _ask(self) -> None:
        try:
            said = self._cluster.messages(self._uid, "Pulled")
            self._said_s = min(self._start_s, sum(map(seconds_in, said)))
        except PlatformError:
            pass  # a start does not fail for want of an explanation
        finally:
            self._answered.set()


def seconds_in(message: str) -> float:
    """``Successfully pulled image "a/b:1" in 412ms (1m2.5s including waiting)`` → 62.5; 0 for another message.  Nodes
    pull one image after another, and a start waits for those before its own, too."""
    found = _PULLED.match(message)
    return sum(float(n) * _SECONDS[unit] for n, unit in _PART.findall(found[2] or found[1])) if found else 0.0
