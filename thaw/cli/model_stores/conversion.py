"""Conversions before a push: GGUF to safetensors, and a slow tokenizer to tokenizer.json.

The work is done by thaw_runtime/convert.py in a process of its own.  The result is a directory in the cache of this
user, which is pushed like any other and is gone afterwards.  The same source gives the same bytes, so a push that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from thaw.checkpoints import checkpoint, fitness, pooling
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.errors import BadRequest, MemoryTooSmall, ModelNotFound, ModelUnsupported

SUFFIX: Final = ".gguf"
_PROGRAM: Final = "thaw_runtime.convert"
_EVERY_S: Final = 5.0
_MOST_S: Final = 4 * 3600.0
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_QUIET: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}

Say = Callable[[str], None]


def is_needed(path: Path) -> bool:
    """Raises BadRequest if the argument is ambiguous."""
    return _gguf_of(path) is not None or _has_slow_tokenizer(path)


@contextmanager
def pushable(path: Path, say: Say, *, force: bool = False) -> Iterator[Path]:
    """Yield the directory to push: ``path``, or a converted copy that is there as long as the block lasts.

    ``say`` is told what is converted, and every few seconds that it goes on.  ``force``: a checkpoint whose tokenizer
    cannot be converted is pushed as it is.  Raises ModelUnsupported, ModelNotFound, BadRequest, MemoryTooSmall.
    """
    if not is_needed(path):
        yield path
        return
    cache_dir().mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix="converted-", dir=cache_dir()))
    try:
        yield _converted(path, target, say, force=force)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _converted(path: Path, target: Path, say: Say, *, force: bool) -> Path:
    if (source := _gguf_of(path)) is not None:
        _convert_gguf(source, target, say)
        return target
    _link_all(path, target)
    try:
        _run("tokenizer", path, target, "the slow tokenizer", say)
    except ModelUnsupported as e:
        if not force:
            raise
        say(f"{e.message}; pushed without")
        return path
    return target


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that ``path`` is, or the only one of a directory without weights in safetensors."""
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise BadRequest(
            f"{path} has {len(found)} GGUF files", hint=f"name the one to push: thaw model push {found[0]} URI"
        )
    return found[0] if found else None


def _has_slow_tokenizer(directory: Path) -> bool:
    """Whether this is a checkpoint that lacks nothing but tokenizer.json."""
    has_weights = any((directory / n).is_file() for n in (checkpoint.WEIGHTS_NAME, checkpoint.SHARDS_NAME))
    is_slow = any((directory / name).is_file() for name in fitness.SLOW_TOKENIZER_NAMES)
    return has_weights and is_slow and not (directory / fitness.TOKENIZER_NAME).exists()


def _convert_gguf(source: Path, target: Path, say: Say) -> None:
    """A tokenizer that lies beside the file is taken instead of the one in it, which is known only in part."""
    for name in _TOKENIZER_FILES:
        if (source.parent / name).is_file():
            shutil.copyfile(source.parent / name, target / name)
    has_tokenizer = (target / fitness.TOKENIZER_NAME).is_file()
    _run("gguf", source, target, source.name, say)
    if not has_tokenizer:
        say(
            "its tokenizer is what GGUF keeps of the model's own: if numbers or rare characters are split in another "
            f"way there, put the model's {fitness.TOKENIZER_NAME} beside {source.name} and push again"
        )


def _link_all(directory: Path, target: Path) -> None:
    for path in (*directory.iterdir(), directory / pooling.POOLING_NAME):
        if path.is_file():
            link = target / path.relative_to(directory)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(path.resolve())


def _run(kind: str, source: Path, target: Path, what: str, say: Say) -> None:
    """Raises ModelUnsupported, ModelNotFound, MemoryTooSmall."""
    if find_spec(_PROGRAM.partition(".")[0]) is None:
        raise _missing(source, _PROGRAM)
    say(f"converting {what}")
    began_s = time.monotonic()
    command = [sys.executable, "-m", _PROGRAM, kind, str(source.absolute()), str(target)]
    with (
        tempfile.TemporaryFile("w+") as told,
        subprocess.Popen(command, stdout=told, stderr=subprocess.DEVNULL, env={**os.environ, **_QUIET}) as process,
    ):
        try:
            _wait(process, began_s, say)
        except BaseException:
            process.kill()  # Ctrl-C reaches both processes from a terminal, but from nowhere else
            raise
        told.seek(0)
        _check(process.returncode, _last_line(told.read()), source, target)
    say(f"converted {what} in {time.monotonic() - began_s:.0f} s")


def _wait(process: subprocess.Popen[Any], began_s: float, say: Say) -> None:
    while True:
        try:
            process.wait(_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            passed_s = time.monotonic() - began_s
            if passed_s > _MOST_S:
                raise ModelUnsupported(f"the conversion did not end within {_MOST_S / 3600:.0f} hours") from None
            say(f"converting: {passed_s:.0f} s so far")


def _last_line(text: str) -> dict[str, Any]:
    try:
        found = json.loads((text.splitlines() or [""])[-1])
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _check(status: int, told: dict[str, Any], source: Path, target: Path) -> None:
    if status == 0:
        return
    if status == -signal.SIGKILL:
        raise MemoryTooSmall(
            f"the conversion of {source} was killed, most likely for its memory",
            hint="it needs the converted model's bytes twice; push from a machine that has them",
        )
    if "missing" in told:
        raise _missing(source, told["missing"])
    error = str(told.get("error", f"the conversion ended with status {status}"))
    if "No space left" in error:
        raise ModelNotFound(f"no room for the converted model in {target.parent}", hint="make room there")
    raise ModelUnsupported(
        f"transformers cannot convert {source}: {error:.500}",
        hint="convert it with the tools of its maker to safetensors with a tokenizer.json, and push that",
    )


def _missing(source: Path, what: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{source} must be converted, and a package for that is missing here: {what}",
        hint="push from where Thaw's engine is installed (scripts/setup.sh run), or convert it elsewhere",
    )
