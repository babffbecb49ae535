"""``-p KEY VALUE`` and ``-P FILE``, as wsk reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thaw import wire
from thaw.errors import BadRequest

PAIRED = ("--param", "-p", "--annotation", "-a")
WITH_PARAMETERS = ("action", "package", "trigger")
SEPARATOR = "\x1f"  # a control character that no shell line contains


def join_pairs(argv: list[str]) -> list[str]:
    """Turn ``-p KEY VALUE`` into ``-p KEY<sep>VALUE``, because typer's list options take one word each.

    ``-p`` takes a pair only in the commands of actions, packages and triggers.
    """
    if not argv or argv[0] not in WITH_PARAMETERS:
        return argv
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        rest.append(word)
        if word in PAIRED:
            pair = [w for _, w in zip(range(2), words, strict=False)]
            if len(pair) < 2:
                raise BadRequest(f"{word} takes a key and a value", hint=f"write {word} KEY VALUE")
            rest.append(SEPARATOR.join(pair))
    return rest


def pairs(words: Sequence[str] | None) -> dict[str, Any]:
    """The given parameters by key.  A value that is JSON is read as JSON, any other value as text, as ``NaN`` and
    ``1e999`` are: JSON has no such numbers."""
    found: dict[str, Any] = {}
    for word in words or ():
        key, separator, value = word.partition(SEPARATOR)
        if not separator:
            raise BadRequest(f"the parameter {word!r} has no value", hint="write -p KEY VALUE")
        try:
            found[key] = wire.strict(value)
        except (ValueError, RecursionError):
            found[key] = value
    return found


def parameters(words: Sequence[str] | None, files: Sequence[Path] | None) -> dict[str, Any]:
    """Merge the files in order, then the pairs of the command line, which have precedence."""
    merged: dict[str, Any] = {}
    for path in files or ():
        merged |= read_object(path)
    return merged | pairs(words)


def key_values(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameters or annotations as the API takes them."""
    return [{"key": k, "value": v} for k, v in values.items()]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.  Raises BadRequest."""
    try:
        plain = wire.strict(path.read_text())
    except OSError as e:
        raise BadRequest(f"{path} cannot be read: {e.strerror}", hint="give the path of a JSON file") from e
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"{path} is not JSON: {e}", hint="it must hold one JSON object") from e
    if not isinstance(plain, dict):
        raise BadRequest(f"{path} is JSON, but not an object", hint="it must look like {...}")
    return plain
