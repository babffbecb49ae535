"""Recognises directories that are nearly models: an adapter, another weights format, a git-lfs pointer, a hub cache.

Each error names the thing, and its hint is the command that helps.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final

from thaw.checkpoints import checkpoint
from thaw.errors import ModelCorrupt, ModelNotFound, ModelUnsupported, ThawError

_LFS: Final = b"version https://git-lfs.github.com/spec/"
_REPO: Final = "models--"  # how a hub cache names the directory of a model


def without_weights(directory: Path) -> ThawError:
    """The error for a directory in which neither the shards' index nor the plain file of the weights is."""
    return (
        _hub_cache(directory)
        or _adapter(directory)
        or _strays(directory)
        or _foreign(directory)
        or ModelUnsupported(
            f"{directory} has no safetensors file",
            hint="give the directory that save_pretrained wrote, with config.json",
        )
    )


def check_not_pointer(path: Path) -> None:
    """Raises ModelCorrupt for a file that git-lfs has not fetched yet."""
    with path.open("rb") as f:
        if f.read(len(_LFS)) == _LFS:
            raise ModelCorrupt(
                f"{path} is a git-lfs pointer and not the file itself",
                hint=f"fetch the files: git -C {shlex.quote(str(path.parent))} lfs pull",
            )


def _hub_cache(directory: Path) -> ThawError | None:
    """The directory of one model in a hub cache, or the cache itself."""
    if (snapshot := _snapshot(directory)) is not None:
        return ModelNotFound(
            f"{directory} is a model's directory in a hub cache; the model itself is in one of its snapshots",
            hint=f"push that: thaw model push {shlex.quote(str(snapshot))} URI",
        )
    for repo in sorted(directory.glob(f"{_REPO}*")):
        if (snapshot := _snapshot(repo)) is not None:
            return ModelNotFound(
                f"{directory} is a hub cache with the models of {len(list(directory.glob(f'{_REPO}*')))} repositories",
                hint=f"push a snapshot of one: thaw model push {shlex.quote(str(snapshot))} URI",
            )
    return None


def _snapshot(repo: Path) -> Path | None:
    """The snapshot that ``main`` is, else any."""
    snapshots = sorted(p for p in (repo / "snapshots").glob("*") if p.is_dir())
    try:
        wanted = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
    except OSError:
        wanted = repo
    return wanted if wanted in snapshots else snapshots[-1] if snapshots else None


def _adapter(directory: Path) -> ThawError | None:
    if not (directory / checkpoint.ADAPTER_CONFIG_NAME).is_file():
        return None
    try:
        base = str(json.loads((directory / checkpoint.ADAPTER_CONFIG_NAME).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    save = (
        "from peft import AutoPeftModelForCausalLM as M; "
        f"M.from_pretrained({str(directory)!r}).save_pretrained('saved')"
    )
    return ModelUnsupported(
        f"{directory} holds an adapter for {base}, but not its {checkpoint.ADAPTER_WEIGHTS_NAME}",
        hint=f"save it as safetensors, then push the result: python -c {shlex.quote(save)}",
    )


def _strays(directory: Path) -> ThawError | None:
    strays = sorted(p.name for p in directory.glob("*.safetensors"))
    if not strays:
        return None
    return ModelUnsupported(
        f"{directory} has neither {checkpoint.WEIGHTS_NAME} nor {checkpoint.SHARDS_NAME}, only {strays[0]}",
        hint="give the directory that save_pretrained wrote: only what one of these two names is the model",
    )


def _foreign(directory: Path) -> ThawError | None:
    if gguf := sorted(directory.glob("*.gguf")):
        return ModelUnsupported(
            f"{directory} has no safetensors file, only {gguf[0].name}",
            hint=f"a push converts it: thaw model push {shlex.quote(str(gguf[0]))} URI",
        )
    named = [n for n in checkpoint.FOREIGN_NAMES if (directory / n).is_file()]
    pickled = sorted(p.name for p in directory.glob("*.bin") if p.name != "training_args.bin")
    found = [*named, *pickled]
    if not found:
        return None
    convert = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[C.from_pretrained({str(directory)!r}).save_pretrained('converted') for C in (M, T)]"
    )
    return ModelUnsupported(
        f"{directory} has no safetensors file, only {found[0]}",
        hint=f"convert it, then push the result: python -c {shlex.quote(convert)}",
    )
