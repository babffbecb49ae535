"""A small disk that a test fills and frees.  Mounting it needs root, like other tests here."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    path: Path

    def fill(self) -> None:
        """Use all the free space."""
        with (self.path / "ballast").open("ab", buffering=0) as ballast:
            for n_bytes in (1 << 20, 1 << 12, 1):
                while _wrote(ballast.write, bytes(n_bytes)):
                    pass

    def free(self) -> None:
        (self.path / "ballast").unlink()


def _wrote(write: Callable[[bytes], int | None], data: bytes) -> bool:
    try:
        return write(data) == len(data)
    except OSError as e:
        if e.errno != errno.ENOSPC:
            raise
        return False


@contextmanager
def full_disk(path: Path, n_mb: int = 4) -> Iterator[Disk]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_mb}m,mode=700", "tmpfs", str(path)], check=True)
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
