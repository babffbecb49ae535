"""What a benchmark reads from the disk is not in the page cache, and it can tell."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench import _page_cache, load
from thaw.checkpoints import checkpoint

N_PAGES = 4096


@pytest.fixture
def model() -> Iterator[Path]:
    """A model on a disk, where the benchmark puts it: the directory of tests may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        (Path(directory) / checkpoint.WEIGHTS_NAME).write_bytes(os.urandom(N_PAGES * mmap.PAGESIZE))
        yield Path(directory)


def test_data_that_was_just_written_is_dropped(model: Path) -> None:
    weights = model / checkpoint.WEIGHTS_NAME
    assert _page_cache.cached_pages(weights) == (N_PAGES, N_PAGES)
    load.drop_pages(model)
    cached, n_pages = _page_cache.cached_pages(weights)
    assert (cached <= N_PAGES // 100, n_pages) == (True, N_PAGES)


def test_a_disk_that_answers_at_once_is_not_taken_for_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def from_a_quick_disk(fd: int, buffers: Sequence[bytearray], offset: int, flags: int = 0) -> int:
        """Read what the read itself has made the kernel read ahead, as if the disk had brought it meanwhile."""
        return preadv(fd, buffers, offset, flags & ~os.RWF_NOWAIT)

    monkeypatch.setattr(os, "preadv", from_a_quick_disk)
    load.drop_pages(model)


def test_pages_that_stay_are_counted_in_the_error(model: Path) -> None:
    weights = model / checkpoint.WEIGHTS_NAME
    with weights.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:: mmap.PAGESIZE]) == N_PAGES  # a page that a process maps cannot be dropped
        with pytest.raises(SystemExit, match=re.escape(f"{weights}: {N_PAGES} of {N_PAGES} pages stayed in memory")):
            load.drop_pages(model)


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert _page_cache.cached_pages(tmp_path / "empty") == (0, 0)
