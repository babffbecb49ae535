"""The per-function config: JSON Schema, and the dataclass it becomes.

The schema (``thaw/schema/function.json``, published in docs/) is the contract; :func:`parse_llm_config` turns a
violation into a ConfigError that names the JSON path, the value and the fix.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from thaw import extensions, wire
from thaw.errors import ConfigError

if TYPE_CHECKING:
    import jsonschema

LORA_RANK: Final = 16
"""``engine.max_lora_rank`` of a function with an adapter that does not set it; most adapters have this rank."""
MOST_INSTANCES: Final = 1024
"""The schema's maximum of ``min_instances`` and ``max_instances`` of one action."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``uri``: the URI of the model, or of the base model of ``adapter``.  ``pool``: a hash that functions which share
    instances have in common (thaw/pools.py); empty without an adapter."""

    uri: str
    served_name: str = field(default="", metadata={"default": "the action's name"})
    adapter: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: str = "auto"
    max_model_len: int = 2048
    args: Mapping[str, object] = field(default_factory=dict)
    tool_parser: str = ""
    max_lora_rank: int = field(default=0, metadata={"default": f"`{LORA_RANK}` with an adapter"})
    """The highest rank of an adapter that its engine takes; 0: it takes none."""


@dataclass(frozen=True, slots=True)
class SloConfig:
    ttft_ms: int = 7500
    tpot_ms: int = 200


@dataclass(frozen=True, slots=True)
class ResourcesConfig:
    gpu_memory_mb: int = 2048
    host_memory_mb: int = 4096
    fetch_mbit: int | None = field(default=None, metadata={"default": "none"})


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
    def adapter_slots(self) -> int:
        """How many adapters an instance has at once: every request that runs may want another one."""
        return self.scaling.max_batch if self.engine.max_lora_rank else 0

    @property
    def reserve_bytes(self) -> int:
        return self.resources.gpu_memory_mb * 1024 * 1024

    @property
    def fetch_bytes_per_s(self) -> int | None:
        """The most that one container may fetch in a second; None: as much as its host's link allows."""
        mbit = self.resources.fetch_mbit
        return None if mbit is None else mbit * 125_000


def schema() -> dict[str, Any]:
    """The published schema, with the transports and the schemes of model URIs that installed packages add."""
    text = resources.files("thaw").joinpath("schema/function.json").read_text()
    loaded: dict[str, Any] = json.loads(text)
    transport, model = loaded["properties"]["transport"], loaded["properties"]["model"]["properties"]
    for name in extensions.installed(extensions.TRANSPORTS):
        transport["enum"].append(name)
        transport["description"] += f", {name}"
    for scheme in extensions.installed(extensions.SOURCES):
        for uri in (model["uri"], model["base"], model["adapter"]):
            uri["pattern"] = uri["pattern"].replace("^(", f"^({re.escape(scheme)}|")
            uri["description"] += f", or {scheme}://…"
    return loaded


def parse_llm_config(plain: object) -> LlmConfig:
    """Validate against the schema and build the config.  Raises ConfigError for the first violation in file order."""
    errors = sorted(_validator().iter_errors(plain), key=lambda e: list(map(str, e.absolute_path)))
    if errors:
        raise _config_error(errors[0])
    config = wire.from_plain(LlmConfig, _with_uri(plain))
    forced = config.scaling.stages
    if config.scaling.keep is not None and forced is not None and config.scaling.keep > forced:
        raise ConfigError(
            "$.scaling.keep",
            config.scaling.keep,
            "keeps more workers than there are stages",
            f"set it to at most {forced}",
        )
    least, most = config.scaling.min_instances, config.scaling.max_instances
    if least > most:
        raise ConfigError(
            "$.scaling.min_instances", least, f"more than max_instances, which is {most}", f"set it to at most {most}"
        )
    return _adapted(config, plain)


def _with_uri(plain: Any) -> Any:
    """Write the base model of an adapter as ``uri``, as :class:`ModelConfig` has it."""
    model = dict(plain["model"])
    base = model.pop("base", None)
    return plain if base is None else {**plain, "model": {**model, "uri": base}}


def _adapted(config: LlmConfig, plain: Any) -> LlmConfig:
    """Complete the config of a function with an adapter, which ``plain`` asks for.  Raises ConfigError."""
    rank = config.engine.max_lora_rank
    if not config.model.adapter:
        if rank:
            raise ConfigError("$.engine.max_lora_rank", rank, "there is no adapter", "name one as model.adapter")
        return config
    for name in ("stages", "max_stages", "keep"):
        asked = plain.get("scaling", {}).get(name)
        if (asked or 1) > 1:
            raise ConfigError(
                f"$.scaling.{name}",
                asked,
                "a model with adapters runs in one stage",
                "leave it out, or merge the adapter into its base model",
            )
    one_stage = replace(config.scaling, max_stages=1, stages=1, keep=None)
    config = replace(config, scaling=one_stage, engine=replace(config.engine, max_lora_rank=rank or LORA_RANK))
    return replace(config, model=replace(config.model, pool=_pool(config)))


def _pool(config: LlmConfig) -> str:
    """A hash of everything but the adapter and the served name."""
    plain = wire.to_plain(replace(config, model=ModelConfig(config.model.uri)))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


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
    if error.validator == "oneOf":
        return _which_model(path, error)
    if error.validator == "required" and isinstance(error.instance, dict):
        missing = next(k for k in node["required"] if k not in error.instance)
        described = node.get("properties", {}).get(missing, {}).get("description", "")
        return ConfigError(f"{path}.{missing}", None, "required but missing", f"add it: {described}")
    return ConfigError(path, error.instance, error.message.replace(repr(error.instance), "value", 1), fix)


def _which_model(path: str, error: jsonschema.ValidationError) -> ConfigError:
    """``model`` names a model as uri, or an adapter and its base, and these are not both there or both missing."""
    model: Any = error.instance
    if "uri" in model:
        extra = "base" if "base" in model else "adapter"
        return ConfigError(
            f"{path}.{extra}", model[extra], "it cannot stand beside uri", "an adapter has model.base and model.adapter"
        )
    missing = "adapter" if "base" in model else "base" if "adapter" in model else "uri"
    described = error.schema["properties"][missing]["description"] if isinstance(error.schema, dict) else ""
    return ConfigError(f"{path}.{missing}", None, "required but missing", f"add it: {described}")
