"""The uids that containers get."""

from __future__ import annotations

import dataclasses
import random

import pytest

from invoker.drivers.docker.uids import DEFAULT_RANGE, UidRange, Uids
from invoker.settings import InvokerSettings
from thaw.errors import PlatformError
from thaw.settings import SettingError

RANGE = UidRange(5000, 5009)


def test_each_container_has_a_uid_of_the_range_and_keeps_it() -> None:
    uids = Uids(RANGE, "h")
    taken = {name: uids.take(name) for name in "abcdefghij"}
    assert sorted(taken.values()) == list(range(5000, 5010))
    assert {name: uids.take(name) for name in "abcdefghij"} == taken
    with pytest.raises(PlatformError, match="all 10 uids of THAW_CONTAINER_UIDS are taken"):
        uids.take("k")
    uids.release("d")
    uids.release("never")
    assert uids.take("k") == taken["d"]


def test_nobody_is_no_container() -> None:
    uids = Uids(UidRange(65_530, 65_540), "h")
    found = [uids.take(str(i)) for i in range(9)]
    assert sorted(found) == [*range(65_530, 65_534), *range(65_536, 65_541)]
    with pytest.raises(PlatformError, match="are taken"):
        uids.take("more")


def test_a_uid_comes_back_after_all_others() -> None:
    uids = Uids(RANGE, "h")
    found = []
    for i in range(20):
        found.append(uids.take(str(i)))
        uids.release(str(i))
    assert sorted(found[:10]) == list(range(5000, 5010))
    assert found[:10] == found[10:]


def test_a_uid_that_a_container_of_the_engine_has_is_not_given() -> None:
    """It may be one of an earlier invoker, or of another host, or of a range that was configured before."""
    first = Uids(RANGE, "h")
    live = {first.take(name) for name in "abc"}
    second = Uids(RANGE, "h")
    found = {second.take(name, {*live, 65_534}) for name in "defghij"}
    assert found | live == set(range(5000, 5010))
    with pytest.raises(PlatformError):
        second.take("k", live)
    gone = min(live)
    assert second.take("k", live - {gone}) == gone


def test_whatever_comes_and_goes_no_two_share_one() -> None:
    rng = random.Random(3)
    uids, live = Uids(RANGE, "h"), dict[str, int]()
    for i in range(2000):
        if len(live) < 10 and rng.random() < 0.6:
            live[str(i)] = uids.take(str(i))
        elif live:
            name = rng.choice(sorted(live))
            uids.release(name)
            del live[name]
        assert len(set(live.values())) == len(live)


def test_hosts_of_one_machine_begin_at_different_places() -> None:
    assert len({Uids(DEFAULT_RANGE, f"host-{i}").take("a") for i in range(20)}) == 20


@pytest.mark.parametrize(
    "text", ["", "5000", "5000-", "6000-5000", "0-10", "999-5000", "5000-2147483648", "a-b", "5-6-7"]
)
def test_what_is_no_range_is_refused_by_the_settings_name(text: str) -> None:
    with pytest.raises(SettingError, match="THAW_CONTAINER_UIDS"):
        UidRange.parse(text)


def test_an_engine_with_a_user_namespace_has_65536() -> None:
    UidRange.parse("1000-65533").check_mapped()
    UidRange.parse("1000-65535").check_mapped()
    with pytest.raises(SettingError, match="THAW_CONTAINER_UIDS=1000-65536"):
        UidRange.parse("1000-65536").check_mapped()


def test_a_range_has_both_ends() -> None:
    assert UidRange.parse("1000-1001") == UidRange(1000, 1001)
    assert UidRange.parse("1000-1000").n_uids == 1


def test_the_setting_is_the_range_of_drivers_without_one() -> None:
    (field,) = (f for f in dataclasses.fields(InvokerSettings) if f.name == "container_uids")
    assert UidRange.parse(str(field.default)) == DEFAULT_RANGE
