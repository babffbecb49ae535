"""Write docs/config.md and docs/cli.md from the schema and the commands.  ``make docs`` runs this module, and tests
check that the pages are up to date.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thaw.config import LlmConfig, schema

DOCS = Path(__file__).parents[2] / "docs"
Page = Callable[[], str]

_CONFIG_HEAD = """# The config of a function

An LLM function is deployed with a JSON file: `thaw action create NAME --config FILE.json`. The file is checked against
[the JSON Schema](../thaw/schema/function.json), on the command line and again by the gateway; an error names the path,
the value and the fix:

```
error: $.scaling.max_batch: value is less than the minimum of 1 (got 0)
hint: requests one instance runs at once, 1 to 1024
```

The smallest one is `{"kind": "llm:vllm", "model": {"uri": "s3://models/smollm2-135m"}}`; a whole one is
[examples/chat/chat.json](../examples/chat/chat.json). Sizes ending in `_mb` are MiB. Ordinary functions need no file.

| path | type | default | what it is |
|---|---|---|---|
"""
_CLI_HEAD = """# The command line

`thaw` has the commands and options of `wsk`. `thaw COMMAND --help` prints the help of a command.

**Target.** `--apihost` and `--auth` name the platform and the key. Without them,
`thaw` reads the file that `WSK_CONFIG_FILE` names, else `~/.wskprops`, else the key of the platform on this machine
(`thaw dev up`).

**https.** A certificate that no public authority has signed is taken when the file that `SSL_CERT_FILE` names has its
signer's (as with `wsk`), or with `-i`, which checks nothing. `--cert FILE --key FILE`, or `CERT` and `KEY` in the
property file, are a client's own certificate.

**The whole line.** `--apihost`, `--auth`, `--cert`, `--key`, `-i`, `-v`, `-d` and `--json` may stand anywhere on it.
`-v` prints each request and its answer on stderr, without the key; `-d` also where in the program an error comes
from. Data is on stdout and words are on stderr. Lists are tables, with `--json` JSON.

**Completion.** `source <(thaw completion bash)` in `~/.bashrc`, the same with `zsh` in `~/.zshrc`; in fish `thaw
completion fish | source`.

**Errors.** An error is one line on stderr, with a hint on how to go on. The exit code is wsk's: the HTTP status
modulo 256 (400 → 144, 401 → 145, 404 → 148, 409 → 153, 502 → 246, 503 → 247). It is 2 for a line that cannot be read,
3 when no platform answers, 202 for a blocking call that goes on after its 60 seconds, and 0 for success.

**Parameters.** `-p KEY VALUE` gives a parameter. A value that is JSON is taken as JSON, everything else as text.
`-P FILE` takes parameters from a JSON object in a file.

**Models.** A model's URI is `s3://bucket/prefix` (in the store that `THAW_S3_ENDPOINT` names, else in that of the
platform on this machine, else at AWS), `file:///absolute/path`, or `http(s)://host/path`, which can only be read.
`hf://org/name@revision` is a model of a hub ([models](models.md#from-a-hub)), which can only be read, too:
`HF_ENDPOINT` names the hub, and `HF_TOKEN` has the token.
A push makes a version, `URI@VERSION`, and `URI` means the newest one from then on
([layout](formats/checkpoint-index.md#where-a-push-puts-a-model)).

**Links.** `thaw dev up --link 200mbit` gives each host a link of that rate. As root it puts each host into a network
namespace with a shaped link; otherwise each host's fetchd paces its reads. It prints which.

**Pipelines.** The stages of a pipeline meet at the relay server, because a platform's containers cannot reach one
another. `thaw dev up --direct` gives each host a `THAW_STAGE_ADDRESS`, and the stages connect by TCP
([transports](transports.md#tcp-beside-redis)). `thaw activation explain` prints the path of every hop.

**State.** The platform on this machine keeps its functions, models, logs and key under the XDG state directory, or
where `THAW_STATE_DIR` says, until `thaw dev down --purge`.
"""


def config_page() -> str:
    rows = (f"| `{path}` | {kind} | {default} | {text} |\n" for path, kind, default, text in _rows(schema(), LlmConfig))
    return _CONFIG_HEAD + "".join(rows)


def _rows(node: dict[str, Any], cls: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name, child in node["properties"].items():
        path = f"{prefix}{name}"
        if child.get("properties"):
            yield from _rows(child, hints[name], f"{path}.")
            continue
        required = name in node.get("required", ())
        yield path, _kind(child), "required" if required else _default(fields.get(name)), child.get("description", "")


def _kind(node: dict[str, Any]) -> str:
    if "const" in node:
        return f'`"{node["const"]}"`'
    if "enum" in node:
        return "string" if isinstance(node["enum"][0], str) else "integer"
    return str(node["type"])


def _default(field: dataclasses.Field[Any] | None) -> str:
    """``field``: None for a key that the parsed config has no place for."""
    if field is None:
        return "none"
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required without `model.base`"
    if "default" in field.metadata:
        return str(field.metadata["default"])
    if field.default == "":
        return "none"
    if field.default is None:
        return "the scheduler decides"
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`".replace("'", '"')
    return "`{}`"


def cli_page() -> str:
    import typer

    from thaw.cli.main import app

    parts = [_CLI_HEAD]
    root: Any = typer.main.get_command(app)
    for name, command in sorted(root.commands.items()):
        if hasattr(command, "commands"):
            parts.append(f"\n## thaw {name}\n\n{command.help}\n")
            parts += [_command(f"thaw {name} {sub}", c) for sub, c in command.commands.items()]
        else:
            parts.append(f"\n## thaw {name}\n")
            parts.append(_command(f"thaw {name}", command))
    return "".join(parts)


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    shown = " ".join(a.name.upper() if a.required else f"[{a.name.upper()}]" for a in arguments)
    lines = [f"\n`{f'{name} {shown}'.strip()}`: {' '.join((command.help or '').split())}\n"]
    described = [(f"`{p.name.upper()}`", p) for p in arguments] + [(_names(p), p) for p in options]
    rows = [f"- {label}: {getattr(p, 'help', '') or ''}\n" for label, p in described if getattr(p, "help", "")]
    return "".join(lines + (["\n", *rows] if rows else []))


def _names(option: Any) -> str:
    return ", ".join(f"`{n}`" for n in [*option.opts, *option.secondary_opts])


def main() -> None:
    for name, page in (("config.md", config_page()), ("cli.md", cli_page())):
        (DOCS / name).write_text(page)
        print(f"wrote {DOCS / name}")


if __name__ == "__main__":
    main()
