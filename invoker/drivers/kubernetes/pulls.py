"""How long a node pulled the image of a pod: the longest cold start of all, and the first of each node.

A pod's status does not tell it; the node notes it as an event ``Pulled`` of the pod.  Only a start that was slow asks.
"""

from __future__ import annotations

import re
from typing import Final

from invoker.drivers.kubernetes.client import Cluster
from thaw.errors import PlatformError

_SLOW_S: Final = 2.5
"""A pod whose image is there runs within two seconds; an image of gigabytes takes minutes."""
_PULLED: Final = re.compile(r"\ASuccessfully pulled image .* in ([0-9hmsuµn.]+)")
_PART: Final = re.compile(r"([0-9.]+)(h|ms|m|s|us|µs|ns)")
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def pulled_s(cluster: Cluster, uid: str, start_s: float) -> float:
    """Seconds, 0 if the image was there or the cluster does not say.  ``start_s``: what the start took."""
    if start_s < _SLOW_S:
        return 0.0
    try:
        said = cluster.messages(uid, "Pulled")
    except PlatformError:
        return 0.0  # a start does not fail, nor wait, for want of an explanation
    return min(start_s, sum(map(seconds_in, said)))


def seconds_in(message: str) -> float:
    """``Successfully pulled image "a/b:1" in 1m2.5s (1m3s including waiting)`` → 62.5; 0 for another message."""
    found = _PULLED.match(message)
    return sum(float(n) * _SECONDS[unit] for n, unit in _PART.findall(found[1])) if found else 0.0
