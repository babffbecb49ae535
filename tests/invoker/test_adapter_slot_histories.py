"""Every history of runs that take and give back adapters: what is in use stays, and in the end nothing is taken."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from invoker.containers.adapter_slots import AdapterSlots, Held, Wait
from thaw.errors import InstanceGone, ThawError, TimeLimitExceeded

N_SLOTS = 2
URIS = st.sampled_from(["a", "b", "c", "d"])
Pinned = Bundle("pinned")
Loading = Bundle("loading")


def at_once() -> Wait:
    return Wait(time.monotonic())


class Histories(RuleBasedStateMachine):
    """``inside`` is what the container has: each adapter by its name, as loads and their results made it."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(N_SLOTS)
        self.inside: list[str] = []
        self.pins: dict[int, int] = {}
        self.loading: dict[str, Held] = {}
        self.n_loads = 0
        self.lost: list[Held] = []

    def uses(self, held: Held, n: int) -> None:
        self.pins[id(held)] = self.pins.get(id(held), 0) + n

    @rule(target=Pinned, uri=URIS)
    def take_what_is_there(self, uri: str) -> tuple[Held, ...]:
        held = self.slots.pinned(uri)
        if held is None:
            assert not any(name.startswith(f"{uri}#") for name in self.inside if self.is_known(name))
            return ()
        assert held.name in self.inside, "an adapter that the container does not have was given out"
        self.uses(held, 1)
        return (held,)

    def is_known(self, name: str) -> bool:
        return name in self.slots.names() and all(held.name != name for held in self.lost)

    @rule(target=Loading, uri=URIS)
    def begin_to_load(self, uri: str) -> tuple[Held, ...]:
        try:
            held, replaced = self.slots.pin(uri, at_once())
        except TimeLimitExceeded:
            return ()
        self.uses(held, 1)
        if replaced is None:
            self.slots.unpin(held)
            self.uses(held, -1)
            return ()
        if replaced:
            self.inside.remove(replaced)
        self.loading[uri] = held
        return (held,)

    @rule(target=Pinned, loading=consumes(Loading))
    def end_a_load(self, loading: tuple[Held, ...]) -> tuple[Held, ...]:
        for held in loading:
            self.n_loads += 1
            name = f"{held.uri}#{self.n_loads}"
            self.slots.loaded(held, name)
            self.inside.append(name)
            del self.loading[held.uri]
        return loading

    @rule(loading=consumes(Loading))
    def a_load_fails(self, loading: tuple[Held, ...]) -> None:
        for held in loading:
            error = ThawError("no bytes")
            self.slots.failed(held, error)
            with pytest.raises(ThawError):
                self.slots.wait_loaded(held, at_once())
            self.slots.unpin(held)
            self.uses(held, -1)
            del self.loading[held.uri]

    @rule(pinned=consumes(Pinned))
    def give_back(self, pinned: tuple[Held, ...]) -> None:
        for held in pinned:
            self.slots.unpin(held)
            self.uses(held, -1)

    @rule(uri=URIS)
    def the_container_loses_one(self, uri: str) -> None:
        held = self.slots.pinned(uri)
        if held is None:
            return
        assert self.slots.lose(held)
        assert not self.slots.lose(held), "news are told once"
        self.inside.remove(held.name)
        self.slots.forget(held)
        assert not self.slots.lose(held)
        self.slots.unpin(held)
        self.lost.append(held)

    @rule()
    def a_restarted_invoker_asks_the_container(self) -> None:
        before = set(self.slots.names())
        self.slots.take_over(self.inside, before)
        assert set(self.inside) <= set(self.slots.names())

    @invariant()
    def the_container_never_has_more_than_its_places(self) -> None:
        assert len(self.inside) + len(self.loading) <= N_SLOTS

    @invariant()
    def what_is_in_use_is_inside(self) -> None:
        names = [held.name for held in self.slots._held.values() if held.pins and held.name]
        assert set(names) <= set(self.inside)

    def teardown(self) -> None:
        """All give back what they have: then each place can be taken again."""
        for held in list(self.loading.values()):
            self.slots.failed(held, ThawError("the end"))
        for held in self.slots._held.values():
            while held.pins:
                self.slots.unpin(held)
        for i in range(N_SLOTS):
            held, _ = self.slots.pin(f"z{i}", at_once())
            self.slots.loaded(held, f"z{i}#1")
        with pytest.raises(TimeLimitExceeded):
            self.slots.pin("one more", at_once())
        self.slots.close()
        with pytest.raises(InstanceGone):
            self.slots.pin("one more", at_once())


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase
