"""How fast do a checkpoint's tensors come from the disk, when nothing of it is in the page cache?

Thaw reads through fetchd's ``file`` source (the real daemon, O_DIRECT, every chunk checked) into a segment and from
there into torch.  It is compared with safetensors' load_file, runai-model-streamer and fastsafetensors (where they are
installed), each in a fresh process that has imported everything before the clock runs.  Every load ends by reading a
byte of every page.  To install the last two, run ``uv pip install --no-deps --target DIR runai-model-streamer
fastsafetensors humanize`` and set ``PYTHONPATH=DIR``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import _common, _model, _page_cache
from bench._common import PYTHON, Goal, interleave, judge, median, python_env, say
from bench._fetchd import Fetchd
from bench._sample import Sample, cpu_s_per_gb, gb_s
from thaw.checkpoints import checkpoint

_MIB = 1024 * 1024
_PER_LAYER = 12  # as many tensors as a decoder layer has
_MOST_CACHED = 0.01
"""The part of the weights that may be cached.  The kernel keeps a page that it is moving or reading at that moment."""
_OTHERS = {"safetensors": "safetensors", "runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}


@dataclass(frozen=True, slots=True)
class Load(Sample):
    us_per_tensor: float = 0.0
    n_tensors: int = 0


def main() -> int:
    options = _common.options(
        __doc__ or "", mb=(0, "size of the model"), dir=("/var/tmp", "a directory on the disk to read from")
    )
    n_bytes = (options.mb or (256 if options.quick else 1000)) * 1_000_000
    rounds = options.n or (3 if options.quick else 7)
    work = Path(tempfile.mkdtemp(prefix="bench-load-", dir=options.dir))
    run = Path(tempfile.mkdtemp(prefix="bench-"))  # the path of a socket has to be short
    try:
        index = _model.write_random(work / "model", n_bytes, _PER_LAYER)
        os.sync()
        pool_mb = 2 * (index.n_bytes // _MIB // 64 + 2) * 64
        with Fetchd(run, pool_mb) as fetchd:
            bench = LoadBench(work / "model", run, fetchd)
            names = ["fetchd", *(n for n, module in _OTHERS.items() if importlib.util.find_spec(module))]
            found = interleave({n: partial(bench.load, n) for n in names}, rounds)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(run)
    missing = [n for n in _OTHERS if n not in found]
    if missing:
        say(f"not installed: {', '.join(missing)} (the head of this file says how)")
    ours = found["fetchd"]
    return _common.report(
        "load",
        [_against(found)],
        rounds=rounds,
        n_bytes=index.n_bytes,
        n_tensors=ours[0].n_tensors,
        gb_s={n: round(gb_s(s), 3) for n, s in found.items()},
        cpu_s_per_gb={n: round(cpu_s_per_gb(s), 3) for n, s in found.items()},
        fetchd_against={n: round(gb_s(ours) / gb_s(s), 3) for n, s in found.items() if n != "fetchd"},
        segment_us_per_tensor=round(median([s.us_per_tensor for s in ours]), 1),
        not_installed=missing,
    )


def _against(found: dict[str, list[Load]]) -> Goal:
    ours, theirs = found["fetchd"], found["safetensors"]
    floor = f"{gb_s(ours):.3f} against {gb_s(theirs):.3f} GB/s"
    rounds = [round(a.gb_s / b.gb_s, 3) for a, b in zip(ours, theirs, strict=True)]
    return judge("vs_safetensors", gb_s(ours) / gb_s(theirs), ">=", 1.2, floor=floor, samples={"by_round": rounds})


class LoadBench:
    def __init__(self, model: Path, run: Path, fetchd: Fetchd) -> None:
        self._model, self._run, self._fetchd = model, run, fetchd

    def load(self, name: str) -> Load:
        drop_pages(self._model)
        command = [
            PYTHON,
            "-m",
            "bench._loaders",
            name,
            str(self._model),
            str(self._run / "fetchd.sock"),
            str(self._fetchd.pid),
        ]
        path = os.pathsep.join(p for p in (python_env()["PYTHONPATH"], os.environ.get("PYTHONPATH", "")) if p)
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=python_env(PYTHONPATH=path))
        if done.returncode != 0:
            raise SystemExit(f"{name} failed: {done.stderr[-1500:]}")
        plain = json.loads(done.stdout.splitlines()[-1])
        self._fetchd.settle()
        return Load(
            plain["seconds"], plain["cpu_s"], plain["n_bytes"], plain.get("us_per_tensor", 0.0), plain["n_tensors"]
        )


def drop_pages(model: Path) -> None:
    """Drop the model's pages from the page cache, and verify that its weights are gone."""
    _page_cache.drop(model.iterdir())
    weights = model / checkpoint.WEIGHTS_NAME
    cached, n_pages = _page_cache.cached_pages(weights)
    if cached > _MOST_CACHED * n_pages:
        raise SystemExit(
            f"{weights}: {cached} of {n_pages} pages stayed in memory after they were written back and dropped; "
            "another process maps them, or the file system has no disk (tmpfs): give another directory with --dir"
        )


if __name__ == "__main__":
    say(f"rounds of: fetchd, {', '.join(_OTHERS)}; the page cache is dropped before each")
    sys.exit(main())
