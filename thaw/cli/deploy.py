"""Turns the command line into the body of ``PUT …/actions/NAME``."""

from __future__ import annotations

import base64
import io
import secrets
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thaw.action import DEFAULT_KINDS, KIND_BLACKBOX, KIND_LLM, KIND_PYTHON, KIND_SEQUENCE, KINDS
from thaw.cli.params import key_values, parameters, read_object
from thaw.errors import BadRequest

SKELETON: Final = "openwhisk/dockerskeleton"
"""wsk's image of --native: it runs a program, which it is given as the code."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """The options of the command line; None for each that was not given."""

    file: Path | None = None
    config: Path | None = None
    kind: str | None = None
    main: str | None = None
    param: list[str] | None = None
    param_file: list[Path] | None = None
    annotation: list[str] | None = None
    timeout: int | None = None
    memory: int | None = None
    concurrency: int | None = None
    stages: int | None = None
    logsize: int | None = None
    web: str | None = None
    web_secure: str | None = None
    sequence: bool = False
    annotation_file: list[Path] | None = None
    del_annotation: list[str] | None = None
    image: str | None = None


def action_body(given: Deployment) -> dict[str, Any]:
    """The body with the given options only: an update keeps the values that its body leaves out.  Raises BadRequest,
    ConfigError.
    """
    body: dict[str, Any] = {}
    if given.config is not None:
        if given.file is not None:
            raise BadRequest(
                "FILE and --config cannot be given together", hint="an LLM function has a config and no code"
            )
        body["config"] = _llm_config(given)
        body["exec"] = {"kind": KIND_LLM, "code": "", "binary": False}
    elif given.stages is not None:
        raise BadRequest("--stages is for LLM functions only", hint="give it together with --config FILE.json")
    elif given.sequence:
        body["exec"] = {"kind": KIND_SEQUENCE, "components": _components(given.file)}
    elif given.image is not None:
        body["exec"] = _own_image(given, given.image)
    elif given.file is not None:
        body["exec"] = _exec(given, given.file)
    if given.param is not None or given.param_file is not None:
        body["parameters"] = key_values(parameters(given.param, given.param_file))
    if given.del_annotation is not None:
        body["delAnnotations"] = given.del_annotation
    annotations = {**parameters(given.annotation, given.annotation_file), **_web(given)}
    if annotations:
        body["annotations"] = key_values(annotations)
    limits = {
        "timeout": given.timeout,
        "memory": given.memory,
        "concurrency": given.concurrency,
        "logs": given.logsize,
    }
    if any(v is not None for v in limits.values()):
        body["limits"] = {k: v for k, v in limits.items() if v is not None}
    return body


def _components(names: Path | None) -> list[str]:
    """``a,/ns/b,pkg/c`` as the API takes them: with a leading slash, in the caller's namespace unless they name one."""
    if names is None:
        raise BadRequest("a sequence needs its actions", hint="thaw action create NAME --sequence ACTION,ACTION")
    found = [name.strip() for name in str(names).split(",")]
    return [name if name.startswith("/") else f"/_/{name}" for name in found]


def _web(given: Deployment) -> dict[str, Any]:
    """The annotations of ``--web`` and ``--web-secure``, which are wsk's."""
    found: dict[str, Any] = {}
    if given.web is not None:
        mode = {"yes": "true", "no": "false"}.get(given.web, given.web)
        if mode not in ("true", "false", "raw"):
            raise BadRequest(
                f"--web takes true, raw or false, not {given.web!r}", hint="thaw action update NAME --web true"
            )
        exported = mode != "false"
        found = {"web-export": exported, "raw-http": mode == "raw", "final": exported}
    if given.web_secure is not None:
        secret: object = {"true": secrets.randbelow(2**53), "false": False}.get(given.web_secure, given.web_secure)
        found["require-whisk-auth"] = secret
    return found


def _llm_config(given: Deployment) -> dict[str, Any]:
    """The config in a file.  It is checked here, so that an error names the path in the file without a round trip."""
    from thaw.config import parse_llm_config

    assert given.config is not None  # noqa: S101  the caller has checked
    config = read_object(given.config)
    if given.stages is not None:
        config["scaling"] = {**config.get("scaling", {}), "stages": given.stages}
    parse_llm_config(config)
    return config


def _own_image(given: Deployment, image: str) -> dict[str, Any]:
    if given.kind not in (None, KIND_BLACKBOX):
        raise BadRequest("--kind and --docker cannot be given together", hint="an image brings its own runtime")
    found: dict[str, Any] = {"kind": KIND_BLACKBOX, "image": image}
    if given.main:
        found["main"] = given.main
    if given.file is None:
        return found
    data = _read(given.file)
    is_zip = zipfile.is_zipfile(io.BytesIO(data))
    code = base64.b64encode(data).decode() if is_zip else _text(given.file, data)
    return {**found, "code": code, "binary": is_zip}


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise BadRequest(f"{file} cannot be read: {e.strerror}", hint="give the path of a .py or .zip file") from e


def _exec(given: Deployment, file: Path) -> dict[str, Any]:
    data = _read(file)
    kind = _kind(given.kind, file)
    if zipfile.is_zipfile(io.BytesIO(data)):
        code, binary = base64.b64encode(data).decode(), True
    else:
        code, binary = _text(file, data), False
    found: dict[str, Any] = {"kind": kind, "code": code, "binary": binary}
    return found | ({"main": given.main} if given.main else {})


def _kind(kind: str | None, file: Path) -> str:
    if kind is None:
        if file.suffix not in (".py", ".zip"):
            raise BadRequest(
                f"{file.name}: the runtime cannot be told from {file.suffix or 'a name without a suffix'}",
                hint=f"name it: --kind {KIND_PYTHON}",
            )
        return KIND_PYTHON
    if kind not in KINDS and kind not in DEFAULT_KINDS:
        raise BadRequest(f"the kind {kind!r} is not supported", hint=f"kinds: {', '.join(KINDS)}")
    if DEFAULT_KINDS.get(kind, kind) == KIND_LLM:
        raise BadRequest(f"the kind {KIND_LLM} has no code", hint="deploy its config: --config FILE.json")
    return kind


def _text(file: Path, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise BadRequest(f"{file} is neither text nor a zip: {e}", hint="give a .py or a .zip file") from e
