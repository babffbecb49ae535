"""The per-function config: JSON Schema, and the dataclass it becomes.

The schema (``thaw/schema/function.json``, published in docs/) is the contract; :func:`parse_llm_config` turns a
violation into a ConfigError that names the JSON path, the value and the fix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from thaw import extensions, wire
from thaw.errors import ConfigError

if TYPE_CHECKING:
    import jsonschema

MOST_INSTANCES: Final = 1024
"""The schema's maximum of ``min_instances`` and ``max_instances`` of one action."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    uri: str
    served_name: str = ""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: str = "auto"
    max_model_len: int = 2048
    args: Mapping[str, object] = field(default_factory=dict)
    tool_parser: str = ""


@dataclass(frozen=True, slots=True)
class SloConfig:
    ttft_ms: int = 7500
    tpot_ms: int = 200


@dataclass(frozen=True, slots=True)
class ResourcesConfig:
    gpu_memory_mb: int = 2048
    host_memory_mb: int = 4096


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    min_instances: int = 0
    max_instances: int = 8
    max_batch: int = 8
    keep_alive_s: float = 300.0
    max_stages: int = 4
    stages: int | None = None  # forced number of stages, for tests and benchmarks
    keep: int | None = None


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    timeout: int = 300_000
    concurrency: int = 64


@dataclass(frozen=True, slots=True)
class LlmConfig:
    """A parsed function config of kind ``llm:vllm``.  Sizes with ``_mb`` are MiB."""

    kind: str
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    slo: SloConfig = SloConfig()
    resources: ResourcesConfig = ResourcesConfig()
    scaling: ScalingConfig = ScalingConfig()
    transport: str = "auto"
    limits: LimitsConfig = LimitsConfig()

    @property
    def reserve_bytes(self) -> int:
        return self.resources.gpu_memory_mb * 1024 * 1024


def schema() -> dict[str, Any]:
    """The published schema, with the transports and the schemes of model URIs that installed packages add."""
    text = resources.files("thaw").joinpath("schema/function.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    transport, uri = loaded["properties"]["transport"], loaded["properties"]["model"]["properties"]["uri"]
    for name in extensions.installed(extensions.TRANSPORTS):
        transport["enum"].append(name)
        transport["description"] += f", {name}"
    for scheme in extensions.installed(extensions.SOURCES):
        uri["pattern"] = uri["pattern"].replace("^(", f"^({re.escape(scheme)}|")
        uri["description"] += f", or {scheme}://…"
    return loaded


def parse_llm_config(plain: object) -> LlmConfig:
    """Validate against the schema and build the config.  Raises ConfigError for the first violation in file order."""
    errors = sorted(_validator().iter_errors(plain), key=lambda e: list(map(str, e.absolute_path)))
    if errors:
        raise _config_error(errors[0])
    config = wire.from_plain(LlmConfig, plain)
    forced = config.scaling.stages
    if config.scaling.keep is not None and forced is not None and config.scaling.keep > forced:
        raise ConfigError(
            "$.scaling.keep",
            config.scaling.keep,
            "keeps more workers than there are stages",
            f"set it to at most {forced}",
        )
    return config


def check_scaling(plain: object) -> None:
    """Raises ConfigError for a part of ``scaling`` that violates the schema."""
    errors = sorted(_validator().evolve(schema=schema()["properties"]["scaling"]).iter_errors(plain), key=str)
    if errors:
        raise _config_error(errors[0])


def _validator() -> Any:
    """A validator that rejects 8.0 as an integer and NaN as a number.

    JSON Schema accepts both, but the code that uses the config does not.
    """
    import jsonschema  # takes 50 ms; a process in a starting container need not wait for it: its config was checked

    plain = jsonschema.Draft202012Validator
    types = plain.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: type(value) is int,
            "number": lambda _, value: type(value) is int or (type(value) is float and math.isfinite(value)),
        }
    )
    strict = jsonschema.validators.extend(plain, type_checker=types)  # type: ignore[no-untyped-call]
    return strict(schema())


def _config_error(error: jsonschema.ValidationError) -> ConfigError:
    path = "$" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
    node: Any = error.schema
    fix = node.get("description", "") if isinstance(node, dict) else ""
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = sorted(node.get("properties", {}))
        unknown = sorted(set(error.instance) - set(known))[0]
        return ConfigError(
            f"{path}.{unknown}", error.instance[unknown], "unknown key", f"known keys: {', '.join(known)}"
        )
    if error.validator == "required" and isinstance(error.instance, dict):
        missing = next(k for k in node["required"] if k not in error.instance)
        described = node.get("properties", {}).get(missing, {}).get("description", "")
        return ConfigError(f"{path}.{missing}", None, "required but missing", f"add it: {described}")
    return ConfigError(path, error.instance, error.message.replace(repr(error.instance), "value", 1), fix)
