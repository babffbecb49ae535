"""One host's pool as the scheduler counts it, in slabs: the effect of each message of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fetchd.segments import SegmentKey
from gateway.scheduler.placement.pool_account import UNLIMITED, Claim, PoolAccount, claim_of
from tests.scheduler.facts import MIB, pool
from thaw.host import HeldSegment, PoolReport
from thaw.ids import HostId, InstanceId
from thaw.model import FileRange
from thaw.plan import PlanModel, PlanStage, StageRole

A, B = InstanceId("a"), InstanceId("b")
TWO = Claim("two", (FileRange("w", 0, 100 * MIB),))
"""A claim that takes two slabs of 64 MiB."""
FIRST, LATER = (FileRange("w", 0, 10),), (FileRange("w", 10, 90),)
STAGE = PlanStage(0, HostId("h0"), "cpu", StageRole.FULL, (0, 1), FIRST, LATER)


def account(n_slabs: int, *held: HeldSegment, seen_ms: int = 1_000, users: tuple[InstanceId, ...] = ()) -> PoolAccount:
    made = PoolAccount()
    made.take_report(said(n_slabs, *held, seen_ms=seen_ms, users=users))
    return made


def said(n_slabs: int, *held: HeldSegment, seen_ms: int, users: tuple[InstanceId, ...] = ()) -> PoolReport:
    return pool(n_slabs, 0, seen_ms, held=held, users=users)


@pytest.mark.parametrize(("sha256", "etag", "version"), [("aa", "", "aa"), ("", "ee", "ee"), ("aa", "ee", "aa")])
def test_a_claim_is_known_by_the_name_that_fetchd_gives_to_the_same_content(
    sha256: str, etag: str, version: str
) -> None:
    claim = claim_of(PlanModel("s3://m/x", sha256, etag, 100), STAGE)
    assert claim.key == SegmentKey("s3://m/x", version, FIRST, LATER).content
    assert claim.ranges == (*FIRST, *LATER)


def test_two_models_of_a_hub_with_the_same_content_are_one_claim_and_two_of_a_bucket_are_two() -> None:
    a, b = "a" * 40, "b" * 40
    hub = [PlanModel(uri, "", etag, 100) for uri, etag in ((f"hf://o/x@{a}", f"{a}.c"), (f"hf://p/y@{b}", f"{b}.c"))]
    bucket = [PlanModel(uri, "c" * 64, "", 100) for uri in ("s3://models/x", "s3://models/y")]
    assert [len({claim_of(model, STAGE).key for model in models}) for models in (hub, bucket)] == [1, 2]


def test_a_host_that_has_not_said_anything_of_its_pool_has_room_for_everything() -> None:
    silent = PoolAccount()
    silent.claim(A, replace(TWO))
    assert (silent.slab_bytes, silent.n_slabs) == (0, UNLIMITED)
    assert silent.free_slabs() == silent.free_without() == UNLIMITED
    assert silent.need(TWO) == 0
    assert not silent.shares(TWO.key)
    assert not silent.is_doubted


def test_a_claim_counts_until_its_instance_is_among_the_holders_and_then_only_what_is_held_does() -> None:
    its = account(5)
    its.claim(A, replace(TWO))
    assert its.free_slabs() == 3
    its.take_report(said(5, HeldSegment("part", 1, False, (A,)), seen_ms=2_000, users=(A,)))
    assert its.free_slabs() == 4
    its.take_report(said(5, HeldSegment("part", 2, False, (A,)), seen_ms=3_000, users=(A,)))
    assert its.free_slabs() == 3


def test_a_claim_of_an_instance_that_already_holds_its_part_counts_nothing() -> None:
    its = account(5, HeldSegment("part", 2, True, (A,)), users=(A,))
    its.claim(A, replace(TWO))
    assert its.free_slabs() == 3


def test_a_claim_of_an_instance_whose_host_never_began_it_is_forgotten_at_once() -> None:
    its = account(5)
    its.claim(A, replace(TWO))
    its.end(A, 0)
    its.end(B, 0)  # B had no claim
    assert its.free_slabs() == 5


@pytest.mark.parametrize("seen_ms", [1_000, 1_499, 1_500])
def test_a_report_that_was_made_by_the_begin_of_an_ended_instance_does_not_end_its_claim(seen_ms: int) -> None:
    its = account(5)
    its.claim(A, replace(TWO))
    its.end(A, 1_500)
    its.take_report(said(5, seen_ms=seen_ms))
    its.take_report(said(5, seen_ms=seen_ms))  # the same report again does not mean that the clock went back
    assert its.free_slabs() == 3
    its.take_report(said(5, seen_ms=1_501))
    assert its.free_slabs() == 5


def test_an_ended_instance_that_the_host_still_names_as_a_user_keeps_its_claim_and_the_others_lose_theirs() -> None:
    its = account(9)
    for instance_id in (A, B):
        its.claim(instance_id, replace(TWO))
        its.end(instance_id, 1_500)
    its.take_report(said(9, seen_ms=2_000, users=(A,)))
    assert its.free_slabs() == 7
    its.take_report(said(9, seen_ms=1_999))  # the host's clock went back
    assert its.free_slabs() == 9


def test_what_is_leaving_is_free_soon_and_not_yet_and_not_when_it_stays_after_all() -> None:
    its = account(9, HeldSegment("a", 3, True, (A,)), HeldSegment("both", 2, True, (A, B)), users=(A, B))
    its.claim(A, replace(TWO))
    its.claim(B, replace(TWO))
    its.set_leaving(A, leaving=True)
    its.set_leaving(InstanceId("c"), leaving=True)  # this instance has nothing on the host
    assert (its.free_slabs(), its.free_without()) == (4, 7)
    assert its.free_without({B}) == 9
    its.set_leaving(A, leaving=False)
    assert its.free_without() == 4


def test_what_an_ended_instance_has_is_soon_free() -> None:
    its = account(5)
    its.claim(A, replace(TWO))
    its.end(A, 1_500)
    assert (its.free_slabs(), its.free_without()) == (3, 5)


def test_a_segment_that_no_instance_has_stays_whoever_goes() -> None:
    its = account(5, HeldSegment("cached", 2, True))
    assert its.free_without({A, B}) == 3


def test_content_that_is_complete_and_held_is_shared_and_takes_nothing_more() -> None:
    its = account(5, HeldSegment(TWO.key, 2, False, (B,)), users=(B,))
    assert (its.shares(TWO.key), its.need(TWO)) == (False, 2)
    its.take_report(said(5, HeldSegment(TWO.key, 2, True, (B,)), seen_ms=2_000, users=(B,)))
    assert (its.shares(TWO.key), its.need(TWO)) == (True, 0)
    its.claim(A, replace(TWO))
    assert its.free_slabs() == 3


def test_more_may_be_promised_than_there_is_once_a_host_says_that_something_else_is_held() -> None:
    its = account(3)
    its.claim(A, replace(TWO))
    its.take_report(said(3, HeldSegment("other", 2, True), seen_ms=2_000))
    assert its.free_slabs() == -1


@pytest.mark.parametrize(("seen_ms", "is_doubted"), [(1_400, True), (1_500, True), (1_501, False), (900, False)])
def test_a_host_that_refused_is_doubted_until_it_has_said_how_its_pool_stood_afterwards(
    seen_ms: int, is_doubted: bool
) -> None:
    """A report that is older than the last one means that the host's clock went back."""
    its = account(5)
    its.refused(1_500)
    assert its.is_doubted
    its.take_report(said(5, seen_ms=seen_ms))
    assert its.is_doubted is is_doubted


def test_a_first_report_ends_a_doubt_only_when_it_was_made_after_the_refusal() -> None:
    its = PoolAccount()
    its.refused(1_500)
    its.take_report(said(5, seen_ms=1_000))
    assert its.is_doubted
    its.take_report(None)  # a fetchd that does not answer does not say that its pool is full
    assert not its.is_doubted


def test_a_host_that_falls_silent_holds_what_it_held() -> None:
    its = account(5, HeldSegment("other", 3, True))
    its.take_report(None)
    assert (its.free_slabs(), its.n_slabs, its.slab_bytes) == (2, 5, 64 * MIB)


def test_a_pool_whose_size_changed_is_counted_anew() -> None:
    its = account(5)
    assert its.free_slabs() == 5
    its.take_report(said(8, seen_ms=2_000))
    assert its.free_slabs() == 8
    its.take_report(pool(8, 0, 3_000, slab_mb=32))
    assert its.slab_bytes == 32 * MIB
    assert its.need(TWO) == 4
