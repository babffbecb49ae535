"""Writes a function's code to a file: ``thaw action get NAME --save``."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

from thaw.errors import BadRequest, Conflict

_SUFFIXES: Final = {"python": ".py", "llm": ".json"}


def save_code(action: dict[str, Any], to: Path | None) -> Path:
    """Return the path of the file, by default the action's name with the suffix of its kind, here.  Raises Conflict for
    a file that exists, BadRequest for an action without code or a file that cannot be written."""
    code = action.get("exec", {})
    text, is_zip = code.get("code", ""), bool(code.get("binary"))
    if not text:
        raise BadRequest(f"{action['name']} has no code: it is of kind {code.get('kind', '')}")
    suffix = ".zip" if is_zip else _SUFFIXES.get(str(code.get("kind", "")).partition(":")[0], ".txt")
    path = Path.cwd() / f"{action['name']}{suffix}" if to is None else to.absolute()
    try:
        with path.open("xb") as file:
            file.write(base64.b64decode(text) if is_zip else text.encode())
    except FileExistsError as e:
        raise Conflict(f"the file {path} exists already", hint="name another one: --save-as FILE") from e
    except OSError as e:
        raise BadRequest(f"{path} cannot be written: {e.strerror}", hint="name another file: --save-as FILE") from e
    return path
