"""The quota of kept instances counts each pool once, no matter which functions join it and leave it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

import pytest
import redis

from gateway.serving.actions.action_cache import Actions
from gateway.serving.actions.quotas import QuotaBook
from gateway.serving.scaling.kept_instances import KeptInstances
from relay.state import redis_link
from relay.state.records import Records
from tests.gateway.calls import GUEST, action_of
from thaw.action import KIND_LLM, Action, Exec
from thaw.config import parse_llm_config
from thaw.errors import Forbidden
from thaw.ids import Namespace
from thaw.quotas import Quotas


class Book:
    def __init__(self, kept: int) -> None:
        self.kept = kept

    def of(self, _: Namespace) -> Quotas:
        return Quotas(100, 10**9, 10**9, 100, 100, 100, kept=self.kept)


class Deploys:
    """Functions of one base that keep 16 instances of each pool."""

    def __init__(self, client: redis.Redis, allowed: int) -> None:
        self.book = Book(allowed)
        self.records = Records(client)
        self._actions = Actions(client, self.records)
        self.kept = KeptInstances(client, self.records, self._actions, cast(QuotaBook, self.book))

    def deploy(self, name: str, **scaling: float) -> None:
        old = self.stored(name)
        new = function(name, old, **scaling)
        added = self.kept.check(new, old)
        self.put(new, old)
        self.kept.check_written(new, old, added)

    def update_at_once(self, *names: str) -> list[str]:
        """Give each function a pool of its own, and check all of them before any is written.  Return the names of the
        refused ones."""
        olds = [old for old in map(self.stored, names) if old is not None]
        changes = [(old, function(old.name[6:], old, keep_alive_s=100.0 + i)) for i, old in enumerate(olds)]
        checked = [(old, new, self.kept.check(new, old)) for old, new in changes]
        for old, new in changes:
            self.put(new, old)
        refused = []
        for old, new, added in checked:
            try:
                self.kept.check_written(new, old, added)
            except Forbidden:
                refused.append(new.name)
        return refused

    def put(self, new: Action, old: Action | None) -> None:
        self._actions.put(new, last=None if old is None else old.version, old=old)

    def stored(self, name: str) -> Action | None:
        return next((a for a in self.records.actions(GUEST) if a.name == f"guest/{name}"), None)

    @property
    def n_kept(self) -> int:
        """Count as the scheduler does: the instances of pools, and of functions without a pool."""
        stored = self.records.actions(GUEST)
        return sum(a.config.scaling.min_instances for a in stored if a.config is not None and a.served_by == a.name)


@pytest.fixture
def guest(valkey_url: str) -> Iterator[Deploys]:
    with redis_link.connect(valkey_url) as client:
        yield Deploys(client, 16)


def function(name: str, old: Action | None = None, *, min_instances: int = 16, **scaling: float) -> Action:
    plain = {
        "kind": "llm:vllm",
        "model": {"base": "s3://models/base", "adapter": f"s3://models/{name}"},
        "scaling": {"min_instances": min_instances, "max_instances": 16, **scaling},
    }
    version = "0.0.1" if old is None else f"0.0.{int(old.version.rpartition('.')[2]) + 1}"
    code = Exec(KIND_LLM, json.dumps(plain))
    return action_of(f"guest/{name}", exec=code, version=version, config=parse_llm_config(plain))


def test_a_function_that_leaves_a_shared_pool_keeps_instances_of_another(guest: Deploys) -> None:
    for name in "abc":
        guest.deploy(name)
    assert (guest.n_kept, guest.kept.count(GUEST)) == (16, 16), "they share the instances"
    with pytest.raises(Forbidden, match=r"\(count: 32, allowed: 16\)"):
        guest.deploy("a", keep_alive_s=100.0)
    guest.deploy("a", keep_alive_s=100.0, min_instances=0)
    assert (guest.n_kept, guest.kept.count(GUEST)) == (16, 16)


def test_a_function_that_joins_a_pool_adds_nothing_to_what_is_kept(guest: Deploys) -> None:
    guest.deploy("a")
    guest.book.kept = 8
    guest.deploy("b")
    guest.deploy("b", min_instances=0)
    guest.deploy("b")
    assert guest.n_kept == 16
    with pytest.raises(Forbidden):
        guest.deploy("c", keep_alive_s=100.0)


def test_the_last_function_of_a_pool_takes_its_instances_along(guest: Deploys) -> None:
    guest.deploy("a")
    guest.book.kept = 8
    guest.deploy("a", keep_alive_s=100.0)
    assert guest.n_kept == 16, "what it keeps already is refused to nobody"


def test_functions_that_leave_a_pool_at_once_keep_no_more_than_the_quota(guest: Deploys) -> None:
    guest.book.kept = 32
    for name in "abc":
        guest.deploy(name)
    assert guest.update_at_once("a", "b", "c")
    assert guest.n_kept <= 32


def test_a_function_that_comes_while_the_only_other_one_leaves_is_counted(guest: Deploys) -> None:
    guest.deploy("a")
    a = guest.stored("a")
    joins, leaves = function("b"), function("a", a, keep_alive_s=100.0)
    added = guest.kept.check(joins, None), guest.kept.check(leaves, a)
    assert added == (0, 0)
    guest.put(joins, None)
    guest.put(leaves, a)
    with pytest.raises(Forbidden):
        guest.kept.check_written(joins, None, 0)
    guest.kept.check_written(leaves, a, 0)
    assert guest.n_kept == 16
