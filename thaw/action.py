"""The deployed function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thaw.config import LlmConfig
from thaw.errors import Conflict
from thaw.ids import ActionName, Namespace

KIND_LLM = "llm:vllm"
KIND_PYTHON = "python:3.11"
KIND_SEQUENCE = "sequence"
KIND_BLACKBOX = "blackbox"
"""OpenWhisk's word for an image of the user's own."""
HTTP_SERVER = "http-server"
"""The annotation of an image that listens on $PORT, as Knative's services do."""
UNCHECKED = "thaw-unchecked"
REFUSED = "thaw-refused"
"""Annotations in which the API shows what a deployed model's check found out (Action.unchecked, Action.refusal); what a
client writes into them is dropped."""
KINDS = (KIND_PYTHON, KIND_LLM)
POOL_MARK = "."
"""The name of a pool (thaw/pools.py) begins with it, and no user's action has such a name."""
POOL_VERSION = "0.0.1"
DEFAULT_KINDS = {"python:default": KIND_PYTHON, "python:3": KIND_PYTHON, "llm:default": KIND_LLM}


@dataclass(frozen=True, slots=True)
class Limits:
    """OpenWhisk's limits: ``timeout`` in milliseconds, ``memory`` and ``logs`` in MB, ``concurrency`` in requests that
    one container serves at once.
    """

    timeout: int = 60_000
    memory: int = 256
    logs: int = 10
    concurrency: int = 1


@dataclass(frozen=True, slots=True)
class StoredCode:
    """Long code, which is kept beside its action (relay/state/code.py): UTF-8 in pieces, of which each has its SHA-256
    here.  Other code has another ``id``.
    """

    id: str
    digests: tuple[str, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Exec:
    """``code`` is source text, or a zip file in base64 when ``binary`` is set.  Long code is named, in the same field:
    a platform process that does not know stored code refuses such an action, and does not write it back without its
    code.  An ``llm:vllm`` action has a config instead of code, and a ``sequence`` has the names of its components,
    which run one after another.  ``packages`` are those that the code's requirements.txt asks for, each line with the
    version and the hashes that were found when the action was deployed (thaw/requirements.py), so every host installs
    the same files.  ``image`` is that of a ``blackbox`` action, by digest; its code may be empty.
    """

    kind: str
    code: str | StoredCode = ""
    binary: bool = False
    main: str = ""
    components: tuple[ActionName, ...] = ()
    packages: tuple[str, ...] = ()
    image: str = ""

    @property
    def stored(self) -> StoredCode | None:
        return self.code if isinstance(self.code, StoredCode) else None


@dataclass(frozen=True, slots=True)
class Action:
    name: ActionName
    namespace: Namespace
    version: str
    exec: Exec
    limits: Limits
    parameters: Mapping[str, object] = field(default_factory=dict)
    annotations: Mapping[str, object] = field(default_factory=dict)
    publish: bool = False
    updated_ms: int = 0
    config: LlmConfig | None = None  # llm kinds
    keep_alive_s: float = 600.0
    max_instances: int = 8
    min_instances: int = 0  # for a function; a model's are in its config
    embeds: bool | None = None  # whether the model computes embeddings, as its deploy found out; None: nobody knows
    most_stages: int = 0  # of a pipeline of its model, as its deploy found out; 0: no limit was found
    unchecked: str = ""  # why no engine has said whether the model would start; empty: one has, or it is no model
    refusal: str = ""  # why the engine would not start the model, which was deployed by force or before it was asked
    init_parameters: Mapping[str, object] = field(default_factory=dict)  # the environment of its code, and no argument

    def check_version(self, wanted: str) -> None:
        """``wanted``: the version that is expected; empty: any.  Raises Conflict for another one."""
        if wanted and wanted != self.version:
            raise Conflict(f"The action has version {self.version}, not {wanted:.40}.", hint="look what it is now")

    @property
    def is_llm(self) -> bool:
        return self.exec.kind == KIND_LLM

    @property
    def adapter(self) -> str:
        """The URI of its LoRA adapter; empty without one."""
        return self.config.model.adapter if self.config is not None else ""

    @property
    def served_by(self) -> ActionName:
        """The name of the action whose instances run it: its own, or its pool's."""
        pool = self.config.model.pool if self.config is not None else ""
        return ActionName(f"{self.namespace}/{POOL_MARK}{pool}") if pool else self.name

    @property
    def served_version(self) -> str:
        """The version of ``served_by``."""
        return POOL_VERSION if self.config is not None and self.config.model.pool else self.version

    @property
    def is_sequence(self) -> bool:
        return self.exec.kind == KIND_SEQUENCE

    @property
    def is_http_server(self) -> bool:
        """Its image is an HTTP server that knows nothing of OpenWhisk's contract."""
        return bool(self.exec.image) and self.annotations.get(HTTP_SERVER) is True

    @property
    def is_conductor(self) -> bool:
        """Its result names the action that runs next."""
        return bool(self.annotations.get("conductor")) and not (self.is_llm or self.is_sequence)

    @property
    def is_composed(self) -> bool:
        """It runs as other calls, and needs no instance of its own."""
        return self.is_sequence or self.is_conductor

    @property
    def idempotent(self) -> bool:
        """An LLM request is greedy or seeded, so another instance may continue it; user code runs at most once unless
        the action has the annotation ``idempotent``.
        """
        return self.is_llm or bool(self.annotations.get("idempotent"))
