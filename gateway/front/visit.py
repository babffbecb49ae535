"""Data that the worker and the application exchange about one request: ``environ["thaw.visit"]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thaw.errors import RequestError, ThawError
from thaw.ids import Namespace

VISIT: Final = "thaw.visit"


class TooSlow(RequestError):
    """The client sends its request more slowly than it must."""

    http_status = 408


@dataclass(slots=True)
class Visit:
    head_only: bool = False
    """The worker asks, before it reads a long body, who sends it and how long it may be."""
    refusal: ThawError | None = None
    """The worker has the request answered with this error."""
    namespace: Namespace | None = None
    """The application's answer: the namespace of the key.  None while no key was accepted."""
    as_read: bool = False
    """Set by the application: make the next part of its answer when the client has read the part before."""
    as_made: bool = False
    """Set by the application: write the head of its answer, and then each part, when it is made, whatever the answer's
    length."""
    max_bytes: int | None = None
    """The application's answer to ``head_only``: how much of the body it would read."""
