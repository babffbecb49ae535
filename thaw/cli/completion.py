"""``thaw completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from thaw.errors import BadRequest

VARIABLE: Final = "_THAW_COMPLETE"
"""The script asks by this variable, and main() sees it."""
_SHELLS: Final = ("bash", "zsh", "fish")


def completion(shell: Annotated[str, typer.Argument(help="The shell: bash, zsh or fish.")]) -> None:
    """Print a completion script. In bash and zsh: source <(thaw completion bash); fish: thaw completion fish|source."""
    from typer._completion_shared import get_completion_script

    if shell not in _SHELLS:
        raise BadRequest(f"there is no completion for {shell!r}", hint=f"shells: {', '.join(_SHELLS)}")
    print(get_completion_script(prog_name="thaw", complete_var=VARIABLE, shell=shell))


def prepare() -> None:
    """A shell asks for what may follow: let typer answer in the form that its scripts read."""
    from typer._completion_classes import completion_init

    completion_init()
