"""Translates the errors that vLLM raises while an engine starts into Thaw's errors."""

from __future__ import annotations

import errno
import re
import traceback
from typing import Final

from thaw.errors import InitFailed, MemoryTooSmall, ModelUnsupported, PlatformError, ThawError
from thaw_runtime.shown import shown

_LISTED: Final = re.compile(r" Must be one of \[.*?\]\.?| Supported architectures: .*")
_ADVICE: Final = re.compile(r" To allow overriding this maximum.*| This could be because of an issue with the check.*")
"""Parts of vLLM's and Transformers' sentences that are long, or that give advice which a user of Thaw cannot follow."""
_OWN_CODE: Final = re.compile(r"execute the (configuration|model) file|trust_remote_code|contains custom code")
_MOST_SHOWN: Final = 300
"""The largest number of characters of the engine's sentence, which may quote any part of a config.json."""
_NO_MEMORY: Final = re.compile(
    r"out of memory|(can.?t|cannot|could not) allocate memory"  # CUDA's driver, torch's allocators, the kernel
    r"|can't start new thread"
    r"|^(available|free) memory on (node|device) ",  # vLLM, which checks the machine before it takes its part
    re.IGNORECASE,
)
"""Sentences that say that memory is missing.  The word "memory" alone proves nothing: a model's name or an option may
contain it."""
_GRANT_TOO_SMALL: Final = re.compile(
    r"^No available memory for the cache blocks|larger than the available KV cache memory"
)
"""vLLM's message when the plan gave it too little memory, even if the host has more."""


def translated(error: Exception) -> ThawError:
    """The error of a start.  Memory that is missing now is missing on the host, which had promised it: before vLLM
    takes any, the memory plan refuses a function that needs more than it asked for."""
    sentence = _sentence(error)
    text = shown(sentence, _MOST_SHOWN)
    if _is_memory_missing(error):
        return PlatformError(
            f"the host has less memory than it promised this start: {text}",
            hint="lower THAW_MEMORY_MB on this host, or free memory there",
        )
    if _GRANT_TOO_SMALL.search(str(error)):
        return MemoryTooSmall(text)
    if _OWN_CODE.search(sentence):
        return brings_code("The configuration of this model")
    if "not supported" in sentence or "architecture" in sentence:
        return ModelUnsupported(text)
    return InitFailed(text)


def brings_code(what: str) -> ModelUnsupported:
    """``what`` needs code of the checkpoint (``auto_map`` in its config.json), which is never even fetched."""
    return ModelUnsupported(
        f"{what} is code that the checkpoint brings itself (auto_map), and Thaw runs no code of a checkpoint",
        hint="use a checkpoint of an architecture that the engine has (docs/models.md)",
    )


def unusable_adapter(name: str, error: Exception) -> ThawError:
    if _is_memory_missing(error):
        return translated(error)
    return ModelUnsupported(
        f"the engine cannot use the adapter {shown(name)}: {shown(_sentence(error), _MOST_SHOWN)}",
        hint="was it made for this base model?",
    )


def _sentence(error: Exception) -> str:
    """Return the error's message in one line.  For a failed validation it is the first fault; for an error without a
    message it is the place where it was raised."""
    if callable(faults := getattr(error, "errors", None)) and (found := faults()):  # pydantic's
        where = ".".join(str(part) for part in found[0].get("loc", ()))
        words = str(found[0].get("msg", "")).removeprefix("Value error, ")
        text = f"{where}: {words}" if where else words
    else:
        cause = error.__cause__  # Transformers' validation puts the fault here
        if type(error).__name__.startswith("StrictDataclass"):
            text = f"config.json cannot be used: {cause or error}"
        else:
            text = f"{type(error).__name__}: {error}" if str(error) else ""
    text = _LISTED.sub("", _ADVICE.sub("", " ".join(text.split())))
    return text or f"the engine gave up without a reason ({type(error).__name__} at {_place(error)})"


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else "an unknown place"


def _is_memory_missing(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)) is not None
