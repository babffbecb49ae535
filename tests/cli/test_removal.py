"""Unneeded versions of a model are removed from real stores, but never one that is used, newest, or being pushed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.fake_gateway import FakeGateway
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints, guards, removal
from thaw.cli.model_stores.stores import Store, open_store
from thaw.cli.model_uses import Uses
from thaw.errors import Conflict, ModelNotFound, StoreUnavailable
from thaw.model import INDEX_NAME

Push = Callable[[str], str]
Meanwhile = Callable[..., None]
NOBODY = removal.NOBODY
MARK = "thaw-gc.0123.mark"


def _verify(uri: str) -> None:
    """Read the version whole and compare it with its index."""
    store = open_store(uri)
    checkpoints.verify(store, checkpoints.read_index(store), lambda _: None)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.full)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("s3_store")) if request.param == "s3" else (tmp_path / "store" / "m").as_uri()


@pytest.fixture
def pushed(uri: str, tmp_path: Path) -> Push:
    """Push a model whose content is this text; return the version's URI."""

    def push(text: str) -> str:
        directory = tmp_path / f"model-{text}"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text('{"num_hidden_layers": 1}')
        (directory / "tokenizer.json").write_text(json.dumps({"text": text}))
        header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
        (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(64))
        index = checkpoints.push(directory, open_store(uri), lambda _: None)
        return versions.pin(uri, index.sha256)

    return push


def used(action: str, uri: str) -> Uses:
    return Uses(frozenset({(action, uri)}), frozenset())


def there(uri: str) -> list[str]:
    return [v.uri for v in removal.versions_of(uri)]


def signs(uri: str) -> list[str]:
    return [n for n in open_store(uri).objects() if guards.is_mark(n) or guards.is_stamp(n)]


def collect(uri: str, uses: Uses = NOBODY, grace_s: float = 0.0) -> dict[str, str]:
    """Why each version that is not the newest stays; empty where it went."""
    return {one.uri: one.kept for one in removal.collect(uri, lambda: uses, grace_s, dry_run=False)}


def test_versions_are_listed_with_the_newest_one(uri: str, pushed: Push) -> None:
    one, two = pushed("one"), pushed("two")
    found = removal.versions_of(uri)
    assert {v.uri: (v.newest, v.finished) for v in found} == {one: (False, True), two: (True, True)}
    assert all(v.n_bytes > 64 and v.pushed_s > 0 for v in found)
    with pytest.raises(ModelNotFound, match="there is nothing at"):
        removal.versions_of(f"{uri}-other")


def test_what_nobody_uses_goes_and_the_newest_stays(uri: str, pushed: Push) -> None:
    one, two = pushed("one"), pushed("two")
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]
    _verify(two)
    assert open_store(one).objects() == {}


def test_what_a_function_names_or_an_instance_runs_stays(uri: str, pushed: Push) -> None:
    pins = [pushed(text) for text in ("one", "two", "three")]
    sha256 = checkpoints.read_index(open_store(pins[1])).sha256
    uses = Uses(frozenset({("guest/a", pins[0]), ("guest/b", uri)}), frozenset({("guest/b", sha256)}))
    assert collect(uri, uses) == {pins[0]: "guest/a uses it", pins[1]: "guest/b (runs) uses it"}
    for pin in pins:
        assert signs(pin) == []
        _verify(pin)


def test_a_function_that_names_the_version_by_another_address_of_the_store_uses_it(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    elsewhere = versions.pin("http://store:9000/models/m", checkpoints.read_index(open_store(one)).sha256)
    assert collect(uri, used("guest/a", elsewhere)) == {one: "guest/a uses it"}


def test_what_may_have_been_the_newest_a_moment_ago_stays_for_a_start_that_chose_it(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    (kept,) = collect(uri, grace_s=3600.0).values()
    assert "it may have been the newest one until" in kept
    _verify(one)


@pytest.mark.parametrize("ahead_s", [0.001, 60.0])
def test_a_store_whose_clock_is_ahead_keeps_nothing_longer_than_asked(
    uri: str, pushed: Push, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    one, _ = pushed("one"), pushed("two")
    changed_s = max(o.modified_s for o in open_store(uri).objects().values())
    monkeypatch.setattr(guards, "wall_ms", lambda: 1000 * (changed_s - ahead_s))

    def kept(grace_s: float) -> list[str]:
        return [r.kept for r in removal.collect(uri, lambda: NOBODY, grace_s, dry_run=True)]

    assert kept(0.0) == [""]
    assert kept(3600.0) == ["it may have been the newest one until 0 s ago"]
    assert one in there(uri)


# ── at the same time ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_version_that_is_being_pushed_again_stays(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    stamps = [guards.begin_push(open_store(one)), guards.begin_push(open_store(one))]
    for stamp in stamps:
        assert collect(uri) == {one: "a push of it is under way"}
        guards.end_push(open_store(one), stamp)
    assert collect(uri) == {one: ""}


def test_a_push_of_what_is_being_removed_gives_way(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    place = open_store(one)
    place.write(MARK, b"")
    with pytest.raises(Conflict, match="is being removed just now"):
        guards.begin_push(place)
    assert signs(one) == [MARK]


def test_the_mark_of_a_killed_removal_stops_no_push(uri: str, pushed: Push, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pushed("one")
    open_store(one).write(MARK, b"")
    monkeypatch.setattr(guards, "MARK_S", -1.0)
    stamp = guards.begin_push(open_store(one))
    assert signs(one) == [stamp]


@pytest.fixture
def meanwhile(uri: str, monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Do something once, right before a file of this name is deleted or read."""

    def arrange(file: str, then: Callable[[], None], verb: str = "delete") -> None:
        kind, todo = type(open_store(uri)), [then]
        call = getattr(kind, verb)

        def calling(store: Store, name: str) -> Any:
            if name == file and todo:
                todo.pop()()
            return call(store, name)

        monkeypatch.setattr(kind, verb, calling)

    return arrange


def test_nobody_takes_the_mark_of_a_removal_that_runs(uri: str, pushed: Push, meanwhile: Meanwhile) -> None:
    one, _ = pushed("one"), pushed("two")
    seen: list[object] = []

    def others() -> None:
        before = signs(one)
        seen.extend(removal.collect(uri, lambda: NOBODY, 0.0, dry_run=True))
        collect(uri, used("guest/a", one))
        seen.append(signs(one) == before)
        with pytest.raises(Conflict, match="is being removed just now"):
            guards.begin_push(open_store(one))

    meanwhile("config.json", others)
    assert collect(uri) == {one: ""}
    assert seen[-1] is True
    assert open_store(one).objects() == {}


def test_a_dry_run_writes_nothing(uri: str, pushed: Push, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pushed("one"), pushed("two")
    monkeypatch.setattr(type(open_store(uri)), "write", lambda *_: pytest.fail("a dry run wrote"))
    monkeypatch.setattr(type(open_store(uri)), "delete", lambda *_: pytest.fail("a dry run deleted"))
    found = removal.collect(uri, lambda: NOBODY, 0.0, dry_run=True)
    assert [(r.uri, r.kept) for r in found] == [(one, "")]


@pytest.mark.parametrize("file", [INDEX_NAME, "config.json", "model.safetensors"])
def test_a_removal_that_was_asleep_leaves_what_was_pushed_meanwhile(
    uri: str, pushed: Push, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    one, _ = pushed("one"), pushed("two")

    def push_past_it() -> None:
        with monkeypatch.context() as later:
            later.setattr(guards, "MARK_S", -1.0)
            guards.end_push(open_store(one), guards.begin_push(open_store(one)))
        again.append(one)

    again: list[str] = []
    meanwhile(file, push_past_it, "read" if file == INDEX_NAME else "delete")
    with pytest.raises(Conflict, match="is being pushed again"):
        collect(uri)
    assert again
    assert "tokenizer.json" in open_store(one).objects(), "it goes after the others, and stopped before"


def test_a_removals_time_includes_the_machines_sleep(uri: str, pushed: Push, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pushed("one"), pushed("two")
    clock = guards.time.clock_gettime
    slept: list[float] = []

    def asked_after_a_sleep() -> list[str]:
        slept[:] = [3600.0]
        return []

    monkeypatch.setattr(
        guards.time, "clock_gettime", lambda c: clock(c) + sum(slept) * (c == guards.time.CLOCK_BOOTTIME)
    )
    with pytest.raises(Conflict, match="took too long"):
        guards.remove(open_store(one), open_store(uri), asked_after_a_sleep, 0.0)
    _verify(one)


class Cut(Exception):
    """A removal is killed here."""


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_removal_that_is_killed_has_taken_nothing_that_was_promised_and_the_next_one_goes_on(
    uri: str, pushed: Push, meanwhile: Meanwhile, file: str
) -> None:
    def cut() -> None:
        raise Cut

    one, two = pushed("one"), pushed("two")
    meanwhile(file, cut)
    with pytest.raises(Cut):
        collect(uri)
    assert INDEX_NAME not in open_store(one).objects(), "hosts say that there is no such version"
    _verify(two)
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]


def test_who_names_the_version_while_it_goes_finds_it_again(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    answers = iter([NOBODY, replace(NOBODY, actions=frozenset({("guest/late", one)}))])
    (found,) = removal.collect(uri, lambda: next(answers), 0.0, dry_run=False)
    assert found.kept == "guest/late uses it"
    _verify(one)


def test_a_platform_that_is_lost_in_the_middle_costs_nothing(uri: str, pushed: Push) -> None:
    one, _ = pushed("one"), pushed("two")
    with pytest.raises(StoreUnavailable):
        list(removal.collect(uri, lost_after(1), 0.0, dry_run=False))
    _verify(one)
    assert signs(one) == []


# ── delete ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_goes_with_all_of_its_versions(uri: str, pushed: Push) -> None:
    pins = [pushed("one"), pushed("two")]
    removed = removal.delete(uri, lambda: NOBODY)
    assert [r.kept for r in removed] == ["", "", ""]
    for place in (*pins, uri):
        assert open_store(place).objects() == {}
    with pytest.raises(ModelNotFound):
        removal.delete(uri, lambda: NOBODY)


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_on_s3_versions_go_and_then_the_model(uri: str, pushed: Push) -> None:
    """A short form of the tests that run on both kinds of stores."""
    one, two = pushed("one"), pushed("two")
    assert collect(uri, used("guest/a", one)) == {one: "guest/a uses it"}
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]
    removal.delete(uri, lambda: NOBODY)
    assert (open_store(two).objects(), open_store(uri).objects()) == ({}, {})


@pytest.mark.parametrize("what", ["name", "pin", "runs"])
def test_what_is_used_is_not_deleted_and_the_names_are_told(uri: str, pushed: Push, what: str) -> None:
    one, two = pushed("one"), pushed("two")
    sha256 = checkpoints.read_index(open_store(one)).sha256
    uses = {
        "name": used("guest/a", uri),
        "pin": used("guest/a", one),
        "runs": Uses(frozenset(), frozenset({("guest/a", sha256)})),
    }[what]
    with pytest.raises(Conflict, match="is used by guest/a"):
        removal.delete(uri, lambda: uses)
    for pin in (one, two):
        _verify(pin)
    assert removal.versions_of(uri)[-1].newest or removal.versions_of(uri)[0].newest


def test_one_version_is_deleted_unless_it_is_the_newest_or_used(uri: str, pushed: Push) -> None:
    one, two = pushed("one"), pushed("two")
    with pytest.raises(Conflict, match="it is the newest one"):
        removal.delete(two, lambda: NOBODY)
    with pytest.raises(Conflict, match="guest/a uses it"):
        removal.delete(one, lambda: used("guest/a", one))
    removal.delete(one, lambda: NOBODY)
    assert there(uri) == [two]
    with pytest.raises(ModelNotFound, match="there is no version"):
        removal.delete(one, lambda: NOBODY)


def test_a_directory_that_was_not_pushed_goes_without_the_files_of_others(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("x")
    removal.delete(tmp_path.as_uri(), lambda: NOBODY)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_what_was_pushed_while_the_model_went_stays(uri: str, pushed: Push, meanwhile: Meanwhile) -> None:
    pushed("one")
    late: list[str] = []
    meanwhile("config.json", lambda: late.append(pushed("two")))
    with pytest.raises(Conflict, match="has been pushed again meanwhile"):
        removal.delete(uri, lambda: NOBODY)
    assert [(v.uri, v.newest) for v in removal.versions_of(uri)] == [(late[0], True)]
    _verify(late[0])


@pytest.mark.parametrize("answers", [2, 3, 4])
def test_a_platform_that_is_lost_while_a_model_goes_costs_nothing(uri: str, pushed: Push, answers: int) -> None:
    two = pushed("two")
    with pytest.raises(StoreUnavailable):
        removal.delete(uri, lost_after(answers))
    assert [(v.uri, v.newest) for v in removal.versions_of(uri)] == [(two, True)]
    _verify(two)


def test_a_model_without_versions_is_asked_about_twice_and_keeps_its_index(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", INDEX_NAME):
        (tmp_path / name).write_text("x")
    with pytest.raises(StoreUnavailable):
        removal.delete(tmp_path.as_uri(), lost_after(1))
    late = Uses(frozenset({("guest/late", tmp_path.as_uri())}), frozenset())
    answers = iter([NOBODY, late])
    with pytest.raises(Conflict, match="is used by guest/late"):
        removal.delete(tmp_path.as_uri(), lambda: next(answers))
    assert len(list(tmp_path.iterdir())) == 3


def lost_after(n_answers: int) -> Callable[[], Uses]:
    left = [NOBODY] * n_answers

    def ask() -> Uses:
        if not left:
            raise StoreUnavailable("the platform is away")
        return left.pop()

    return ask


# ── the commands ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("uri", ["file"], indirect=True)
def test_the_commands_ask_the_platform_who_uses_what(
    thaw: Run, at: Run, gateway: FakeGateway, tmp_path: Path, pushed: Push, uri: str
) -> None:
    """The base and the adapter of a function are both used by it."""
    one, two = pushed("one"), pushed("two")
    rows = [{"action": "guest/a", "version": "0.0.1", "uri": name} for name in (one, "s3://models/another")]
    gateway.answers["GET /api/v1/thaw/models"] = (200, {"actions": rows, "running": []})
    listed = at("model", "versions", uri).stdout
    assert "guest/a" in listed
    assert "newest" in listed
    refused = at("model", "delete", uri)
    assert (refused.returncode, f"{uri} is used by guest/a" in refused.stderr) == (153, True), refused.stderr
    assert f"{one} stays: guest/a uses it" in at("model", "gc", uri, "--older-than", "0").stdout
    assert set(there(uri)) == {one, two}
    gateway.answers["GET /api/v1/thaw/models"] = (200, {"actions": [], "running": []})
    assert f"{one} would go" in at("model", "gc", uri, "--older-than", "0", "--dry-run").stdout
    assert "ok: 1 versions" in at("model", "gc", uri, "--older-than", "0").stdout
    assert there(uri) == [two]
    unknown = thaw("model", "delete", uri)
    assert "nobody knows which functions use this model" in unknown.stderr
    assert there(uri) == [two]
    assert thaw("model", "delete", uri, "--force").returncode == 0
    assert not (tmp_path / "store" / "m").exists()
