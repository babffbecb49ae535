"""Turns a PUT's body into an Action: resolves the kind, checks the config, and keeps fields that the body leaves
out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.api import bounded_json
from gateway.api.openwhisk.code_upload import LongCode, longest_string
from gateway.api.openwhisk.code_zip import decoded_zip, packages_of
from gateway.serving.actions.packages import qualified
from gateway.serving.routing.routes import version_key
from gateway.settings import GatewaySettings
from thaw import wire
from thaw.action import (
    DEFAULT_KINDS,
    HTTP_SERVER,
    KIND_BLACKBOX,
    KIND_LLM,
    KIND_SEQUENCE,
    KINDS,
    REFUSED,
    UNCHECKED,
    Action,
    Exec,
    Limits,
)
from thaw.clock import wall_ms
from thaw.config import parse_llm_config
from thaw.errors import BadRequest, PlatformError, TooLarge
from thaw.ids import ActionName, Namespace
from thaw.image_name import ImageName

Json = Mapping[str, Any]

PYTHON_LIMITS: Final = {"timeout": (100, 300_000), "memory": (128, 512), "logs": (0, 10), "concurrency": (1, 500)}
LLM_LIMITS: Final = {
    "timeout": (100, 3_600_000),
    "memory": (64, 1024 * 1024),
    "logs": (0, 10),
    "concurrency": (1, 10_000),
}
_VARIABLE: Final = re.compile(r"\A(?!__OW_)[^=\x00]{1,256}\Z")
_MOST_CONTAINERS: Final = 4_096
"""The most lists and objects in the parameters or annotations that an entity keeps.  They take thirty times as much
memory as their text, in every process that reads the entity."""
_VERSION: Final = re.compile(r"\A[0-9]{1,9}(\.[0-9]{1,9}){2}\Z")
_UNITS: Final = {"timeout": "milliseconds", "memory": "MB", "logs": "MB", "concurrency": "requests"}


class NotHere(PlatformError):
    """A part of OpenWhisk that this version does not have."""

    http_status = 501


def malformed(problem: str) -> BadRequest:
    return BadRequest(f"The request content was malformed:\n{problem}")


def new_action(
    name: ActionName, namespace: Namespace, body: Json, settings: GatewaySettings, last: str | None = None
) -> Action:
    """``last``: the last version of a deleted action of this name.  Its instances may still run, and must not be taken
    for those of the new action.  Raises BadRequest, ConfigError, TooLarge, NotHere."""
    if "exec" not in body and "config" not in body:
        raise malformed("exec undefined")
    blank = Action(name, namespace, "0.0.1", Exec(""), Limits(), annotations={"provide-api-key": False})
    return changed_action(blank, body, settings, version="0.0.1" if last is None else next_version(last, None))


def changed_action(old: Action, body: Json, settings: GatewaySettings, *, version: str | None = None) -> Action:
    """Return ``old`` with the body's changes: annotations are merged, parameters replaced whole, the patch version
    raised."""
    action = old
    if "exec" in body or "config" in body:
        action = _with_code(action, body, settings)
        # the deploy looks at the model again
        action = replace(action, embeds=None, most_stages=0, unchecked="", refusal="")
    action = _with_limits(action, body.get("limits"))
    if "parameters" in body:
        action = _with_parameters(action, body["parameters"], settings.parameters_bytes)
    given = key_values("annotations", body.get("annotations", []), settings.parameters_bytes)
    annotations = {**old.annotations, **{k: v for k, v in given.items() if k not in (UNCHECKED, REFUSED)}}
    for key in _names(body.get("delAnnotations")):
        annotations.pop(key, None)
    annotations["exec"] = action.exec.kind  # must be a string, or ``wsk action list`` breaks
    if action.exec.image and annotations.get(HTTP_SERVER) is True:
        annotations = {"web-export": True, "raw-http": True, "final": True, **annotations}
    publish = bool(body.get("publish", old.publish))
    _check_annotations(annotations, action)
    return replace(
        action,
        annotations=annotations,
        publish=publish,
        updated_ms=wall_ms(),
        version=version or next_version(old.version, body.get("version")),
    )


def _check_annotations(annotations: Json, action: Action) -> None:
    """Refuse annotations that would protect less than they say, or do nothing.  Raises BadRequest."""
    if annotations.get(HTTP_SERVER, False) not in (True, False):
        raise malformed(f"the annotation {HTTP_SERVER} must be true or false")
    if annotations.get(HTTP_SERVER) is True and not action.exec.image:
        raise malformed(f"the annotation {HTTP_SERVER} is for images (exec.kind {KIND_BLACKBOX})")
    if not isinstance(annotations.get("require-whisk-auth", False), bool | str | int | float):
        raise malformed("the annotation require-whisk-auth must be true, false, a string or a number")
    if action.limits.concurrency > 1 and not action.is_llm and annotations.get("provide-api-key") is True:
        raise malformed(
            "provide-api-key needs limits.concurrency 1: runs at once would find each other's keys in __OW_API_KEY"
        )


def key_values(what: str, plain: Any, max_bytes: int) -> dict[str, object]:
    if not isinstance(plain, list) or not all(isinstance(p, dict) and isinstance(p.get("key"), str) for p in plain):
        raise malformed(f"{what} must be a list of {{key, value}}")
    if any(p.get("init") not in (None, True, False) for p in plain):
        raise malformed(f"init of {what} must be true or false")
    values = {p["key"]: p.get("value") for p in plain}
    n_bytes = len(json.dumps(values))
    if n_bytes > max_bytes:
        raise TooLarge(f"Request larger than allowed: {n_bytes} > {max_bytes} bytes.")
    if not bounded_json.has_few_containers(values, _MOST_CONTAINERS):
        raise TooLarge(f"Request larger than allowed: {what} with more than {_MOST_CONTAINERS} lists and objects.")
    return values


def _with_parameters(action: Action, plain: Any, max_bytes: int) -> Action:
    """OpenWhisk's parameters with ``init`` are variables of the environment in which the code is loaded, and the others
    are arguments of each run."""
    key_values("parameters", plain, max_bytes)  # all of them together
    at_init = {p["key"]: p.get("value") for p in plain if p.get("init") is True}
    if at_init and not (action.exec.code or action.exec.image):
        raise malformed("parameters with init are for actions with code or an image")
    if strange := [name for name in at_init if not _VARIABLE.match(name)]:
        raise malformed(f"{strange[0]!r:.60} cannot be a variable of the environment, as a parameter with init is")
    parameters = {p["key"]: p.get("value") for p in plain if p["key"] not in at_init}
    return replace(action, parameters=parameters, init_parameters=at_init)


def _names(plain: Any) -> list[str]:
    if plain is None:
        return []
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise malformed("delAnnotations must be a list of names")
    return plain


def next_version(old: str, asked: Any) -> str:
    """Return the version that the client asks for if it is later, else the next patch.  A version must not be used
    twice, because its instances hold its code."""
    if asked is not None and (not isinstance(asked, str) or not _VERSION.match(asked)):
        raise malformed(f"version must be of the form 1.2.3, not {asked!r:.40}")
    if asked is not None and version_key(asked) > version_key(old):
        return str(asked)
    major, minor, patch = version_key(old)
    return f"{major}.{minor}.{patch + 1}"


def _with_code(action: Action, body: Json, settings: GatewaySettings) -> Action:
    plain = body.get("exec", {"kind": KIND_LLM})
    if not isinstance(plain, dict) or not isinstance(plain.get("kind"), str):
        raise malformed("exec must be an object with a kind")
    kind = DEFAULT_KINDS.get(plain["kind"], plain["kind"])
    if kind == KIND_SEQUENCE:
        components = _components(plain.get("components"), action)
        return replace(action, exec=Exec(kind, components=components), config=None, min_instances=0)
    if kind == KIND_BLACKBOX:
        return replace(action, exec=_image_exec(plain, settings), config=None)
    if kind not in KINDS:
        valid = ", ".join(f"'{k}'" for k in (*KINDS, *DEFAULT_KINDS))
        raise BadRequest(
            f"The specified runtime '{kind}' is not supported by this platform. Valid values are: {valid}."
        )
    code = plain.get("code", "")
    if not isinstance(code, str | LongCode):
        raise malformed("exec.code must be a string")
    if kind == KIND_LLM:
        return _with_config(action, code, body, settings)
    if not code:
        raise malformed("exec.code undefined")
    main = plain.get("main")
    if main is not None and not isinstance(main, str):
        raise malformed("exec.main must be a string")
    return replace(action, exec=_exec(kind, code, main or "", settings), config=None)


def _exec(kind: str, code: str | LongCode, main: str, settings: GatewaySettings) -> Exec:
    data = code.zip if isinstance(code, LongCode) else decoded_zip(code)
    packages = packages_of(data) if data is not None else ()
    if isinstance(code, LongCode):
        return Exec(kind, code.stored, data is not None, main, packages=packages)
    if len(code) > settings.code_bytes:
        raise TooLarge(f"Request larger than allowed: {len(code)} > {settings.code_bytes} bytes.")
    return Exec(kind, code, data is not None, main, packages=packages)


def _image_exec(plain: Json, settings: GatewaySettings) -> Exec:
    """The code is optional, and the image's own business."""
    image, code, main = plain.get("image"), plain.get("code", ""), plain.get("main") or ""
    if not isinstance(image, str):
        raise malformed("exec.image undefined")
    if not isinstance(code, str | LongCode) or not isinstance(main, str):
        raise malformed("exec.code and exec.main must be strings")
    found = _exec(KIND_BLACKBOX, code, main, settings)
    return replace(found, image=str(ImageName.parse(image)), packages=())


def _components(plain: Any, action: Action) -> tuple[ActionName, ...]:
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise malformed("exec.components must be a list of actions' names")
    return tuple(qualified(name, action.namespace) for name in plain)


def _with_config(action: Action, code: str | LongCode, body: Json, settings: GatewaySettings) -> Action:
    """Take the config from ``config``, an object in the body, or from the code, which is then the config's text."""
    plain = body.get("config")
    if plain is None:
        if isinstance(code, LongCode):
            most = longest_string(settings.parameters_bytes)
            raise TooLarge(f"Request larger than allowed: a config of {code.stored.n_bytes} > {most} bytes.")
        plain = bounded_json.parse(code.encode() or b"null")
    config = parse_llm_config(plain)
    limits = Limits(
        timeout=config.limits.timeout, memory=config.resources.host_memory_mb, concurrency=config.limits.concurrency
    )
    return replace(
        action,
        exec=Exec(KIND_LLM, json.dumps(wire.to_plain(plain))),
        config=config,
        limits=limits,
        keep_alive_s=config.scaling.keep_alive_s,
        max_instances=config.scaling.max_instances,
        min_instances=0,
    )


def _with_limits(action: Action, plain: Any) -> Action:
    if plain is None:
        return action
    if not isinstance(plain, dict):
        raise malformed("limits must be an object")
    given = {k: v for k, v in plain.items() if k in _UNITS and v is not None}
    for name, value in given.items():
        low, high = (LLM_LIMITS if action.is_llm else PYTHON_LIMITS)[name]
        if type(value) is not int or not low <= value <= high:
            raise malformed(f"limits.{name}: {value!r} {_UNITS[name]} is not within {low} to {high}")
    return replace(action, limits=replace(action.limits, **given))
