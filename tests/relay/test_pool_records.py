"""An action with an adapter and its pool are written and deleted in one step, and their bytes count."""

from __future__ import annotations

import pytest
import redis

from relay.state.records import Records
from tests.relay.samples import GUEST, with_quotas
from thaw.action import KIND_LLM, Action, Exec, Limits
from thaw.config import parse_llm_config
from thaw.errors import Forbidden, TooLarge
from thaw.ids import ActionName


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
    f, changed = function("f"), function("f", "0.0.2", scaling={"max_batch": 2})
    records.put_action(f, last=None)
    now = with_quotas(client)[1].usage(GUEST).code_bytes
    with_room, _ = with_quotas(client, code_bytes=now + 100)
    with_room.put_action(changed, last="0.0.1", old=f)  # its pool takes the place of the other one
    with pytest.raises(TooLarge):
        with_room.put_action(function("g", scaling={"max_batch": 3}), last=None)
    assert names(records) == {"guest/f", changed.served_by}


def test_a_pool_is_no_deployed_action_of_a_quota(client: redis.Redis) -> None:
    records, storage = with_quotas(client, actions=2)
    f = function("f")
    records.put_action(f, last=None)
    records.put_action(function("g", scaling={"max_batch": 2}), last=None)
    assert storage.usage(GUEST).actions == 2
    with pytest.raises(Forbidden, match=r"too many actions \(count: 3, allowed: 2\)"):
        records.put_action(function("h", adapter=""), last=None)
    records.put_action(function("f", "0.0.2", scaling={"max_batch": 3}), last="0.0.1", old=f)
    records.delete_action(GUEST, ActionName("guest/g"))
    assert storage.usage(GUEST).actions == 1
