"""How one entity is printed: as JSON, one field of it, or a summary in wsk's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from thaw.cli.context import print_json, say_aside

Field = Annotated[str | None, typer.Argument(help="Print only this field.")]
Summary = Annotated[bool, typer.Option("--summary", "-s", help="Say in a few lines what it is.")]


def show_entity(
    kind: str, found: dict[str, Any], field: str | None, summary: bool, *, name: str = "", served: str = ""
) -> None:
    """``kind``: action, package, trigger, rule or activation.  ``served``: the text about a model.  Raises BadRequest
    for a field that it does not have."""
    said = f"got {kind} {name or found.get('name', '')}"
    if summary:
        print("\n".join(_activation(found) if kind == "activation" else _entity(kind, found)))
    elif field is not None:
        shown = _field(kind, found, field)
        say_aside(f"{said}, displaying field {field}")
        print_json(shown)
    else:
        say_aside(said + served)
        print_json(found)


def _field(kind: str, found: dict[str, Any], field: str) -> Any:
    from thaw.errors import BadRequest

    if field not in found:
        raise BadRequest(f"this {kind} has no field {field!r}", hint=f"fields: {', '.join(found)}")
    return found[field]


def _entity(kind: str, found: dict[str, Any]) -> Iterator[str]:
    """A line, its parameters, and of a package its functions and feeds in the same form."""
    place = f"/{found['namespace']}/{found['name']}"
    notes = {note["key"]: note["value"] for note in found.get("annotations", [])}
    yield f"{kind} {place}: {notes['description']}" if notes.get("description") else f"{kind} {place}"
    if kind in ("action", "package", "feed"):
        yield f"   (parameters: {_parameters(found, notes)})"
    if kind == "rule":
        yield f"   (status: {found.get('status', '')})"
    for inner, within in (("action", "actions"), ("feed", "feeds")):
        for one in found.get(within, []):
            yield from (f" {line}" for line in _entity(inner, {**one, "namespace": place[1:]}))


def _parameters(found: dict[str, Any], notes: dict[str, Any]) -> str:
    """wsk marks bound parameters with one star, and parameters that a caller cannot change with two."""
    bound = {p["key"] for p in found.get("parameters", [])}
    described = notes.get("parameters")
    named = (
        {p["name"] for p in described if isinstance(p, dict) and "name" in p} if isinstance(described, list) else set()
    )
    mark = "**" if notes.get("final") is True else "*"
    texts = [f"{mark if name in bound else ''}{name}" for name in sorted(bound | named)]
    return ", ".join(texts) or "none defined"


def _activation(found: dict[str, Any]) -> Iterator[str]:
    import json

    from thaw.cli.output.tables import moment

    response = found.get("response", {})
    place = f"/{found['namespace']}/{found['name']}"
    yield f"activation result for '{place}' ({response.get('status', '')} at {moment(found.get('start'))})"
    yield json.dumps(response.get("result"), indent=4, ensure_ascii=False)
