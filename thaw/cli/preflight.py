"""The platform's verdict on a model before it runs: after a deploy, and before a push moves a name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from thaw.cli.context import err
from thaw.errors import BadRequest, ModelNotFound, ThawError, Unauthorized, Unavailable, Unfit

if TYPE_CHECKING:
    from thaw.cli.platform_api.property_file import Target

_SOON_S: Final = 1.0
"""A check that takes longer waits, most likely for an engine that others use."""
_ASKS_S: Final = 2.0


@contextmanager
def saying_that_it_waits() -> Iterator[None]:
    """If the block, in which the platform checks a model, takes longer than a moment, say once on stderr what it waits
    for, and how long at most."""
    ended = threading.Event()
    teller = threading.Thread(target=_say_that_it_waits, args=(ended,), daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _say_that_it_waits(ended: threading.Event) -> None:
    if ended.wait(_SOON_S):
        return
    line = f"checking: waiting for a free engine on a host to say whether the model would start{_longest()} …"
    err().print(line, soft_wrap=True, markup=False)


def _longest() -> str:
    """How long the platform lets a check take, if it says so."""
    from thaw.cli.context import globals_
    from thaw.cli.platform_api.client import Client

    try:
        asks = Client(_target(), insecure=globals_.insecure, read_timeout_s=_ASKS_S)
        limits = asks.get("limits")
    except ThawError:
        return ""
    longest_s = limits.get("preflightSeconds") if isinstance(limits, dict) else None
    return f", at most {longest_s:g} s" if isinstance(longest_s, int | float) else ""


def say_notes(found: object) -> None:
    """Print a deploy's notes for the user on stderr."""
    if not isinstance(found, dict):
        return
    refusal = found.get("refusal")
    if isinstance(refusal, dict):
        _note(f"deployed although it would not start: {refusal.get('message')}")
    for note in found.get("notes", ()):
        _note(str(note))
    if not found.get("checked"):
        later = "; a host looks at it as soon as it can, and thaw action get shows the answer"
        reason = f"{found.get('reason')}{later if found.get('later') else ''}"
        _note(f"the engine was not asked whether it can run this model: {reason}")


def check_pushed(uri: str) -> None:
    """Ask the platform whether the version at ``uri`` would start; say so if no host can tell.  Raises Unfit."""
    try:
        found = _asked(uri)
    except (Unauthorized, BadRequest) as e:
        return _note(f"the engine is asked about this model when it is deployed ({e.message})")
    except ThawError as e:
        return _note(f"the engine is asked about this model when it is deployed: {e.message}")
    refusal = found.get("refusal") or {}
    if refusal.get("code") == ModelNotFound.__name__:  # the model need not be meant for this platform
        return _note("the engine is asked about this model when it is deployed: the platform does not see this store")
    if refusal:
        step = str(refusal.get("hint", ""))
        raise Unfit(
            f"{uri} would not start, so the name means what it meant: {refusal.get('message')}",
            hint=f"{step}; to let the name mean it anyway, push again with --force (nothing is sent twice)".lstrip(
                "; "
            ),
        )
    return say_notes(found)


def _asked(uri: str) -> dict[str, Any]:
    from thaw.cli.platform_api.client import Client
    from thaw.cli.platform_api.property_file import effective_file

    target = _target()
    if not target.auth:
        raise Unauthorized(f"no platform is set in {effective_file()}")
    with saying_that_it_waits():
        found = Client(target).post("preflight", {"config": {"kind": "llm:vllm", "model": {"uri": uri}}})
    if not isinstance(found, dict):
        raise Unavailable("the platform's answer cannot be read")
    return found


def _target() -> Target:
    from thaw.cli.context import globals_
    from thaw.cli.platform_api.property_file import resolve

    return resolve(globals_.apihost, globals_.auth, globals_.cert, globals_.key)


def _note(text: str) -> None:
    err().print(f"note: {text}", soft_wrap=True, markup=False)
