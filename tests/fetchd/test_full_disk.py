"""A fetchd that cannot write its log goes on fetching, and releases the segments that it fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fetchd.harness import ROOT, Fetchd, file_bytes, wait_until, write_model
from thaw.ids import GroupId, InstanceId


class Mute(Fetchd):
    """A fetchd in which every line of the log fails with ENOSPC."""

    def __enter__(self) -> Self:
        with open("/dev/full", "w") as full:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fetchd.main"], env=self.environ, cwd=ROOT, stderr=full
            )
        wait_until(Path(self.socket).exists, 30)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.process.terminate()
        self.ended = self.process.wait(15)
        self.short.cleanup()


def test_a_fetchd_whose_log_cannot_be_written_fetches_offers_and_ends_as_ever(tmp_path: Path) -> None:
    with Mute(tmp_path / "r") as fetchd:
        for n in range(3):  # if a thread had died, the next fetch would fail
            model = write_model(tmp_path / f"m{n}", seed=n)
            facts = fetchd.client.inspect(model.as_uri())
            started = fetchd.start(facts, f"g{n}")
            fetchd.client.wait(GroupId(f"g{n}"), 0, deadline_s=20)
            descriptors, reader = fetchd.open(started.segment_id, f"i{n}")
            assert reader.wait(reader.n_bytes, 30) == reader.n_bytes
            assert file_bytes(reader, facts, "model.safetensors") == (model / "model.safetensors").read_bytes()
            reader.close()
            descriptors.close()
            fetchd.client.close_descriptor_socket(InstanceId(f"i{n}"))
            fetchd.client.cancel(GroupId(f"g{n}"), 1)
        wait_until(lambda: all(s.holders == () for s in fetchd.client.status().segments))
    assert fetchd.ended == 0
