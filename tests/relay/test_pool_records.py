"""An action with an adapter and its pool are written and deleted in one step, and both count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from relay.state import redis_link
from relay.state.records import Records
from relay.state.storage import Storage
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import parse_llm_config
from thaw.errors import Forbidden
from thaw.ids import ActionName, Namespace
from thaw.quotas import Quotas

GUEST = Namespace("guest")


def function(name: str, version: str = "0.0.1", adapter: str = "a", **config: object) -> Action:
    model = {"base": "s3://models/base", "adapter": f"s3://models/{adapter}"} if adapter else {"uri": "s3://models/b"}
    parsed = parse_llm_config({"kind": "llm:vllm", "model": model, **config})
    return Action(ActionName(f"guest/{name}"), GUEST, version, Exec(KIND_LLM), Limits(), config=parsed)


class Killed(redis.Redis):
    """The connection of a gateway that is killed after its first write."""

    writes = 0

    def eval(self, *args: object) -> object:  # type: ignore[override]
        self.writes += 1
        assert self.writes == 1, "a gateway that is killed here has written one of two"
        return super().eval(*args)  # type: ignore[arg-type]


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis_link.connect(valkey_url) as made:
        yield made


@pytest.fixture
def records(client: redis.Redis) -> Records:
    return Records(client)


def names(records: Records) -> set[str]:
    return {a.name for a in records.actions(GUEST)}


def test_a_function_and_its_pool_are_one_write(records: Records, valkey_url: str) -> None:
    first = function("f")
    Records(Killed.from_url(valkey_url)).put_action(first, last=None)
    assert names(records) == {"guest/f", first.served_by}
    Records(Killed.from_url(valkey_url)).delete_action(GUEST, first.name)
    assert names(records) == set()


def test_a_pool_goes_with_the_last_function_that_has_it(records: Records) -> None:
    f, g = function("f"), function("g", adapter="b")
    records.put_action(f, last=None)
    records.put_action(g, last=None)
    other = function("f", "0.0.2", scaling={"max_batch": 2})
    records.put_action(other, last="0.0.1", old=f)
    assert names(records) == {"guest/f", "guest/g", f.served_by, other.served_by}
    records.delete_action(GUEST, g.name)
    assert names(records) == {"guest/f", other.served_by}
    records.put_action(function("f", "0.0.3", adapter=""), last="0.0.2", old=other)
    assert names(records) == {"guest/f"}


def test_a_function_without_room_for_its_pool_is_not_written(client: redis.Redis, records: Records) -> None:
    own = Quotas(2, 10**9, 10**9, 10**6, 10**6, 10**6)
    bounded = Records(client, storage=Storage(client, lambda _: own))
    f = function("f")
    bounded.put_action(f, last=None)
    changed = function("f", "0.0.2", scaling={"max_batch": 2})
    bounded.put_action(changed, last="0.0.1", old=f)  # its pool takes the place of the other one
    with pytest.raises(Forbidden):
        bounded.put_action(function("g", scaling={"max_batch": 3}), last=None)
    assert names(records) == {"guest/f", changed.served_by}
