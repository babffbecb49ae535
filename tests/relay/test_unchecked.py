"""The list of unchecked actions: one gateway at a time looks at each, and none is lost with it."""

from __future__ import annotations

import redis

from relay.state import keys
from relay.state.unchecked import Claim, Unchecked
from thaw.ids import ActionName

A, B = ActionName("guest/a b"), ActionName("guest/p/b")


def claimed(listed: Unchecked, for_s: float = 60.0) -> Claim:
    found = listed.claim(for_s)
    assert isinstance(found, Claim), found
    return found


def test_each_is_claimed_by_one_and_due_again_when_its_claim_is_over(client: redis.Redis) -> None:
    ours, theirs = Unchecked(client), Unchecked(client)
    assert ours.claim(60) is None
    ours.add(A)
    ours.add(B)
    assert {claimed(ours).name, claimed(theirs).name} == {A, B}
    left_s = ours.claim(60)
    assert isinstance(left_s, float)
    assert 50 < left_s <= 60
    ours.add(A)
    assert claimed(theirs, for_s=0).name == A
    assert claimed(ours).name == A, "the claim of a gateway that died is over"


def test_a_look_ends_only_what_it_has_claimed(client: redis.Redis) -> None:
    listed = Unchecked(client)
    listed.add(A)
    first = claimed(listed)
    listed.add(A)  # deployed anew meanwhile
    listed.done(first)
    listed.again(first, 60)
    second = claimed(listed)
    listed.done(second)
    listed.again(second, 0)
    assert listed.claim(60) is None, "what is done does not come back"


def test_what_nobody_could_tell_is_due_later(client: redis.Redis) -> None:
    listed = Unchecked(client)
    listed.add(A, 30)
    early = listed.claim(60)
    assert isinstance(early, float)
    assert 20 < early <= 30
    listed.add(A)
    listed.again(claimed(listed), 90)
    late = listed.claim(60)
    assert isinstance(late, float)
    assert 80 < late <= 90
    assert client.zcard(keys.UNCHECKED) == 1
