"""The platform's verdict on a model before it runs: after a deploy, and before a push moves a name."""

from __future__ import annotations

from typing import Any

from thaw.cli.context import err
from thaw.errors import BadRequest, ModelNotFound, ThawError, Unauthorized, Unavailable, Unfit


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
        _note(f"the engine was not asked whether it can run this model: {found.get('reason')}")


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
    from thaw.cli.context import globals_
    from thaw.cli.platform_api.client import Client
    from thaw.cli.platform_api.property_file import effective_file, resolve

    target = resolve(globals_.apihost, globals_.auth)
    if not target.auth:
        raise Unauthorized(f"no platform is set in {effective_file()}")
    found = Client(target).post("preflight", {"config": {"kind": "llm:vllm", "model": {"uri": uri}}})
    if not isinstance(found, dict):
        raise Unavailable("the platform's answer cannot be read")
    return found


def _note(text: str) -> None:
    err().print(f"note: {text}", soft_wrap=True, markup=False)
