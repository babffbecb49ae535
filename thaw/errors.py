"""The one error tree.

::

    ThawError
    ├── RequestError                     the platform cannot do what the caller asked for
    │   ├── BadRequest            400    malformed body, bad parameter
    │   │   ├── ConfigError       400    a function config: names the JSON path, the value and the fix
    │   │   ├── BadParameter      400    a request's parameter, by name: OpenAI's clients read it as ``param``
    │   │   └── Unfit             400    no start of this function would succeed; it may be deployed anyway
    │   ├── Unauthorized          401
    │   ├── Forbidden             403
    │   ├── NotFound              404
    │   ├── Conflict              409
    │   ├── TooLarge              413
    │   ├── UnsupportedType       415    a body of a type that this resource does not read
    │   ├── Throttled             429    carries retry_after_s
    │   └── StorageFull           507    the state server keeps no more for this namespace
    ├── DeveloperError            502    the function or its model cannot run; a retry changes nothing
    │   ├── ModelNotFound         502    no such bucket, object or directory
    │   ├── ModelCorrupt          502    truncated, a failed checksum, a header with false values
    │   ├── ModelUnsupported      502    not safetensors, an architecture or dtype the engine does not have
    │   ├── MemoryTooSmall        502    says how much memory is needed and how much there is
    │   ├── InitFailed            502    user code or engine failed to initialise
    │   └── TimeLimitExceeded     502    the action ran longer than its limit
    └── PlatformError             500    the platform failed
        ├── WorkerLost            500    the container died during the request; LLM requests continue elsewhere
        ├── InstanceGone          500    the instance left between routing and arrival; nothing ran: route again
        ├── InstanceBusy          500    all slots of the instance are taken; nothing ran: route again
        │   └── AdapterMissing    424    it has lost the run's adapter; its invoker, which thought so, reads the status
        ├── StoreUnavailable      500    the model store answered 5xx or not at all; a retry may help
        ├── ModelChanged          500    the store has another version than the plan names: read it and plan again
        ├── Unavailable           503    no host, no state server
        │   └── PoolFull          503    a host's memory for models is in use: try another host, or later
        └── ProtocolError         500    bytes between components violate a format
            └── StaleEpoch        500    a command of an older scheduler

A class exists because some caller handles it differently.  ``code`` is the stable name that crosses processes
(:class:`ErrorInfo`).  The HTTP status is decided here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error in the form that crosses processes: a stable code, a sentence, and what the operator should do next."""

    code: str
    message: str
    hint: str = ""
    printed: str = ""
    """The end of a container's stderr before its start failed: for the activation's logs, not for answers."""
    printed_out: str = ""
    """The same of stdout."""


class ThawError(Exception):
    """Root of the tree.  ``str(error)`` is the sentence for a person to read; ``hint`` says what to do next."""

    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.printed = self.printed_out = ""

    @property
    def code(self) -> str:
        return type(self).__name__

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.hint, self.printed, self.printed_out)


class RequestError(ThawError):
    http_status = 400


class BadRequest(RequestError):
    pass


class BadParameter(BadRequest):
    """The message begins with the parameter's name and a colon."""

    def __init__(self, param: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{param}: {problem}", hint=hint)
        self.param = param


class ConfigError(BadRequest):
    """A function config is wrong at ``path`` (``$.scaling.max_batch``)."""

    def __init__(self, path: str, value: object, problem: str, fix: str) -> None:
        super().__init__(f"{path}: {problem} (got {value!r})", hint=fix)
        self.path = path


class Unfit(BadRequest):
    """The model that a function names would not start."""


class Unauthorized(RequestError):
    http_status = 401


class Forbidden(RequestError):
    http_status = 403


class NotFound(RequestError):
    http_status = 404


class Conflict(RequestError):
    http_status = 409


class TooLarge(RequestError):
    http_status = 413


class UnsupportedType(RequestError):
    """The body is of a type that this resource does not read."""

    http_status = 415


class Throttled(RequestError):
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class StorageFull(RequestError):
    http_status = 507


class DeveloperError(ThawError):
    http_status = 502


class ModelNotFound(DeveloperError):
    pass


class ModelCorrupt(DeveloperError):
    pass


class ModelUnsupported(DeveloperError):
    pass


class MemoryTooSmall(DeveloperError):
    pass


class InitFailed(DeveloperError):
    pass


class TimeLimitExceeded(DeveloperError):
    pass


class PlatformError(ThawError):
    http_status = 500


class WorkerLost(PlatformError):
    pass


class InstanceGone(PlatformError):
    pass


class InstanceBusy(PlatformError):
    pass


class AdapterMissing(InstanceBusy):
    http_status = 424


class StoreUnavailable(PlatformError):
    pass


class ModelChanged(PlatformError):
    pass


class Unavailable(PlatformError):
    http_status = 503


class PoolFull(Unavailable):
    pass


class ProtocolError(PlatformError):
    pass


class StaleEpoch(ProtocolError):
    pass


def _tree(cls: type[ThawError]) -> dict[str, type[ThawError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


def from_info(info: ErrorInfo) -> ThawError:
    """The error that ``info`` describes.  An unknown code (from a newer peer) becomes a PlatformError with its text."""
    cls = _tree(ThawError).get(info.code, PlatformError)
    error = cls.__new__(cls)
    ThawError.__init__(error, info.message, hint=info.hint)
    error.printed, error.printed_out = info.printed, info.printed_out
    if isinstance(error, Throttled):
        error.retry_after_s = 1.0
    if isinstance(error, ConfigError):
        error.path = info.message.partition(":")[0]
    if isinstance(error, BadParameter):
        error.param = info.message.partition(":")[0]
    return error
