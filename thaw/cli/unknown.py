"""A command that does not exist: finds its name here, or the command that was probably meant."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from typer.core import TyperGroup

from thaw.errors import BadRequest

_WEB = "a web action has a URL of its own: thaw action update NAME --web true; thaw action get NAME --url"
_CALLED: Final[Mapping[str, str]] = {
    "api": f"there is no API gateway here; {_WEB}",
    "project": "write the commands into a script: thaw action update NAME FILE.py, for each of them",
    "sdk": "for the shell: thaw completion bash; for a function: any editor, docs/functions.md",
    "deploy": "thaw action update NAME FILE.py; a model: thaw action update NAME --config FILE.json",
    "invoke": "thaw action invoke NAME --result",
    "run": "thaw action invoke NAME --result; a model: thaw chat NAME",
    "call": "thaw action invoke NAME --result",
    "logs": "of a call: thaw activation logs ID; as they come: thaw action logs NAME --follow",
    "poll": "thaw activation poll",
    "serve": "thaw dev up; then thaw action update NAME --config FILE.json",
    "pull": "thaw model push hf://ORG/NAME URI",
    "push": "thaw model push DIRECTORY URI",
    "ps": "thaw top",
    "get": "thaw action get NAME",
    "delete": "thaw action delete NAME",
    "apply": "thaw action update NAME FILE.py",
    "service": "thaw action create NAME FILE.py; thaw action list",
    "function": "thaw action",
    "fn": "thaw action",
    "up": "thaw dev up",
    "down": "thaw dev down",
    "status": "thaw dev status; thaw top",
    "login": "thaw property set --apihost HOST --auth KEY",
    "config": "thaw property set --apihost HOST --auth KEY",
    "help": "thaw --help; thaw COMMAND --help",
    "action ls": "thaw action list",
    "action rm": "thaw action delete NAME",
    "action deploy": "thaw action update NAME FILE.py",
    "action call": "thaw action invoke NAME --result",
    "action run": "thaw action invoke NAME --result",
    "activation invoke": "thaw action invoke NAME --result",
    "activation poll-logs": "thaw activation poll",
    "package refresh": "there is no place that packages come from: thaw package bind /NAMESPACE/PACKAGE NAME",
    "namespace quotas": "thaw namespace quota NAMESPACE",
    "trigger invoke": "thaw trigger fire NAME",
    "rule fire": "a rule is not fired, but its trigger: thaw trigger fire NAME",
    "property list": "thaw property get",
    "model pull": "thaw model push hf://ORG/NAME URI",
    "host delete": "thaw host drain HOST; then end its invoker",
}


class UnknownCommand(BadRequest):
    """The exit code is that of a line that cannot be read."""


class Group(TyperGroup):
    """Commands below a noun, or the nouns themselves."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args or args[0].startswith("-") or ctx.resilient_parsing or self.get_command(ctx, args[0]) is not None:
            return super().resolve_command(ctx, args)
        program, _, nouns = ctx.command_path.partition(" ")
        asked = f"{nouns} {args[0]}".strip()
        near = get_close_matches(args[0], self.commands)
        meant = f"did you mean {program} {nouns} {near[0]}?".replace("  ", " ") if near else ""
        hint = _CALLED.get(asked) or meant or f"{ctx.command_path} --help lists what there is"
        raise UnknownCommand(f"there is no command {program} {asked}", hint=hint)
