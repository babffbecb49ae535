"""A start waits for a fetchd that is coming up, and nothing else waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from fetchd.server import UnixServer
from invoker.containers import patient_fetch
from invoker.containers.patient_fetch import PatientFetchClient
from relay.clients.channel import Channel
from relay.clients.fetch import DescriptorClient, FetchClient
from relay.protocol.messages import FetchStart, FetchStarted, Refused, to_plain
from tests.invoker.platform import WAIT_S
from thaw.errors import PoolFull, Unavailable
from thaw.ids import GroupId
from thaw.logs import Log
from thaw.plan import PlanModel

REQUEST = FetchStart(GroupId("1" * 32), 0, 1, PlanModel("s3://models/tiny", "00", "", 10), ((0, 10),), 0, 0.0)
STARTED = FetchStarted("segment-1", 10, False)


@contextmanager
def serving(run_dir: Path, *replies: object) -> Iterator[list[object]]:
    """A fetchd that replies so to its connections, one after another.  None: it hangs up.  Yields its requests."""
    requests, said = list[object](), iter(replies)

    def answer(channel: Channel) -> None:
        requests.append(channel.receive())
        reply = next(said)
        if reply is not None:
            channel.send(to_plain(reply))

    with closing(UnixServer(str(run_dir / "f"), 0o600, answer, Log("test"), most=8)):
        yield requests


def test_a_fetch_begins_as_soon_as_fetchd_listens(run_dir: Path) -> None:
    with ThreadPoolExecutor(1) as starts:
        started = starts.submit(PatientFetchClient(str(run_dir / "f")).start, REQUEST)
        with serving(run_dir, STARTED):
            assert started.result(WAIT_S).segment_id == "segment-1"


def test_one_that_does_not_come_is_unavailable(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_fetch, "_COMES_UP_S", 0.05)
    with pytest.raises(Unavailable, match="fetchd does not listen"):
        PatientFetchClient(str(run_dir / "f")).inspect("s3://models/tiny")


def test_one_that_is_killed_over_the_question_is_asked_again(run_dir: Path) -> None:
    with serving(run_dir, None, STARTED):
        assert PatientFetchClient(str(run_dir / "f")).start(REQUEST).segment_id == "segment-1"


def test_a_fetchd_that_hangs_up_is_unavailable(run_dir: Path) -> None:
    path = str(run_dir / "f")
    with serving(run_dir, None, None):
        with pytest.raises(Unavailable, match="the connection to fetchd broke: the peer closed"):
            FetchClient(path).cancel(REQUEST.group_id, 1)
        with (
            closing(DescriptorClient.connect(path)) as descriptors,
            pytest.raises(Unavailable, match="the descriptor socket broke: the peer closed"),
        ):
            descriptors.granted(deadline_s=5)


def test_without_its_directory_the_error_is_that_it_does_not_listen(run_dir: Path) -> None:
    with pytest.raises(Unavailable, match="fetchd does not listen"):
        PatientFetchClient(str(run_dir / "none" / "f")).inspect("s3://models/tiny")


def test_a_full_pool_is_asked_once(run_dir: Path) -> None:
    with serving(run_dir, Refused(PoolFull("full").info())) as requests, pytest.raises(PoolFull):
        PatientFetchClient(str(run_dir / "f")).start(REQUEST)
    assert len(requests) == 1


def test_what_ends_something_does_not_wait(run_dir: Path) -> None:
    with pytest.raises(Unavailable):
        PatientFetchClient(str(run_dir / "f")).cancel(REQUEST.group_id, 1)
