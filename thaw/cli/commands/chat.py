"""``thaw chat NAME``: talk to a deployed model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from thaw.cli.context import client, err

if TYPE_CHECKING:
    from thaw.cli.platform_api.answers import Answer


def chat(
    name: Annotated[str, typer.Argument(help="An action of kind llm:vllm.")],
    message: Annotated[
        str | None, typer.Option("--message", help="Ask only this. Without it, a conversation begins.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="With 0 the same question gets the same answer.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling: the same seed gives the same answer.")] = None,
) -> None:
    """Talk to a deployed model.  The answer appears as it is generated."""
    from thaw.cli.platform_api.answers import ask

    api = client()
    options: dict[str, int | float] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    messages = [{"role": "system", "content": system}] if system else []
    for text in [message] if message is not None else _lines(name):
        messages.append({"role": "user", "content": text})
        answer = ask(api, name, messages, _write, **options)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer.text})
        err().print(f"[dim]{_summary(answer)}[/dim]", soft_wrap=True)


def _lines(name: str) -> Iterator[str]:
    """The lines that the user types, until the end of input (Ctrl-D) or /bye."""
    if sys.stdin.isatty():
        err().print(f"[dim]{name}: type a message; Ctrl-D or /bye ends the conversation[/dim]")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip() == "/bye":
            return
        if line.strip():
            yield line


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _summary(answer: Answer) -> str:
    from thaw.cli.output.tables import duration

    n_tokens = answer.completion_tokens if answer.completion_tokens is not None else len(answer.arrivals_s)
    parts = [f"first token {duration(answer.ttft_s)}", f"{n_tokens} tokens"]
    if answer.tpot_s is not None:
        parts.append(f"{duration(answer.tpot_s)} a token")
    if answer.activation_id:
        parts.append(f"thaw activation explain {answer.activation_id}")
    return " · ".join(parts)
