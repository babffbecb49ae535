"""Unneeded versions of a model are removed from real stores, but never one that is used, newest, or being pushed."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import KEY, Run
from tests.cli.fake_gateway import FakeGateway
from tests.seaweed import KEY as S3_KEY
from tests.seaweed import SECRET, seaweed
from thaw.checkpoints import versions
from thaw.cli.model_stores import checkpoints, guards, removal
from thaw.cli.model_stores.stores import Store, open_store
from thaw.cli.model_uses import Uses
from thaw.errors import Conflict, ModelNotFound, StoreUnavailable
from thaw.model import INDEX_NAME

NOBODY = removal.NOBODY
MARK = "thaw-gc.0123.mark"


def _verify(uri: str) -> None:
    """Read the version whole and compare it with its index."""
    store = open_store(uri)
    checkpoints.verify(store, checkpoints.read_index(store), lambda _: None)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with seaweed(tmp_path_factory.mktemp("weed"), "models") as started:
        yield started


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.full)])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return (tmp_path / "store" / "m").as_uri()
    for name, value in (
        ("THAW_S3_ENDPOINT", request.getfixturevalue("endpoint")),
        ("AWS_ACCESS_KEY_ID", S3_KEY),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    return f"s3://models/{secrets.token_hex(8)}"  # the store is the same for all tests


@pytest.fixture
def pushed(uri: str, tmp_path: Path) -> Callable[[str], str]:
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


def there(uri: str) -> list[str]:
    return [v.uri for v in removal.versions_of(uri)]


def signs(uri: str) -> list[str]:
    return [n for n in open_store(uri).objects() if guards.is_mark(n) or guards.is_stamp(n)]


def collect(uri: str, uses: Uses = NOBODY, grace_s: float = 0.0) -> dict[str, str]:
    """Why each version that is not the newest stays; empty where it went."""
    return {one.uri: one.kept for one in removal.collect(uri, lambda: uses, grace_s, dry_run=False)}


def test_versions_are_listed_with_the_newest_one(uri: str, pushed: Callable[[str], str]) -> None:
    one, two = pushed("one"), pushed("two")
    found = removal.versions_of(uri)
    assert {v.uri: (v.newest, v.finished) for v in found} == {one: (False, True), two: (True, True)}
    assert all(v.n_bytes > 64 and v.pushed_s > 0 for v in found)
    with pytest.raises(ModelNotFound, match="there is nothing at"):
        removal.versions_of(f"{uri}-other")


def test_what_nobody_uses_goes_and_the_newest_stays(uri: str, pushed: Callable[[str], str]) -> None:
    one, two = pushed("one"), pushed("two")
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]
    _verify(two)
    assert open_store(one).objects() == {}


def test_what_a_function_names_or_an_instance_runs_stays(uri: str, pushed: Callable[[str], str]) -> None:
    pins = [pushed(text) for text in ("one", "two", "three")]
    sha256 = checkpoints.read_index(open_store(pins[1])).sha256
    uses = Uses(frozenset({("guest/a", pins[0]), ("guest/b", uri)}), frozenset({("guest/b", sha256)}))
    assert collect(uri, uses) == {pins[0]: "guest/a uses it", pins[1]: "guest/b (runs) uses it"}
    for pin in pins:
        assert signs(pin) == []
        _verify(pin)


def test_a_function_that_names_the_version_by_another_address_of_the_store_uses_it(
    uri: str, pushed: Callable[[str], str]
) -> None:
    one, _ = pushed("one"), pushed("two")
    elsewhere = versions.pin("http://store:9000/models/m", checkpoints.read_index(open_store(one)).sha256)
    assert collect(uri, Uses(frozenset({("guest/a", elsewhere)}), frozenset())) == {one: "guest/a uses it"}


def test_what_may_have_been_the_newest_a_moment_ago_stays_for_a_start_that_chose_it(
    uri: str, pushed: Callable[[str], str]
) -> None:
    one, _ = pushed("one"), pushed("two")
    (kept,) = collect(uri, grace_s=3600.0).values()
    assert "it may have been the newest one until" in kept
    _verify(one)


def test_a_dry_run_removes_nothing(uri: str, pushed: Callable[[str], str]) -> None:
    one, two = pushed("one"), pushed("two")
    assert [r.kept for r in removal.collect(uri, lambda: NOBODY, 0.0, dry_run=True)] == [""]
    for pin in (one, two):
        _verify(pin)


@pytest.mark.parametrize("ahead_s", [0.001, 60.0])
def test_a_store_whose_clock_is_ahead_keeps_nothing_longer_than_asked(
    uri: str, pushed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, ahead_s: float
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


def test_a_version_that_is_being_pushed_again_stays(uri: str, pushed: Callable[[str], str]) -> None:
    one, _ = pushed("one"), pushed("two")
    stamps = [guards.begin_push(open_store(one)), guards.begin_push(open_store(one))]
    for stamp in stamps:
        assert collect(uri) == {one: "a push of it is under way"}
        guards.end_push(open_store(one), stamp)
    assert collect(uri) == {one: ""}


def test_a_push_of_what_is_being_removed_gives_way(uri: str, pushed: Callable[[str], str]) -> None:
    one, _ = pushed("one"), pushed("two")
    place = open_store(one)
    place.write(MARK, b"")
    with pytest.raises(Conflict, match="is being removed just now"):
        guards.begin_push(place)
    assert signs(one) == [MARK]


def test_the_mark_of_a_removal_that_was_killed_stops_no_push(
    uri: str, pushed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pushed("one")
    open_store(one).write(MARK, b"")
    monkeypatch.setattr(guards, "MARK_S", -1.0)
    stamp = guards.begin_push(open_store(one))
    assert signs(one) == [stamp]


@pytest.fixture
def meanwhile(uri: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Do something once, right before a file of this name is deleted."""

    def arrange(file: str, then: Callable[[], None]) -> None:
        kind, todo = type(open_store(uri)), [then]
        delete = kind.delete

        def deleting(store: Store, name: str) -> None:
            if name == file and todo:
                todo.pop()()
            delete(store, name)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "delete", deleting)

    return arrange


def test_nobody_takes_the_mark_of_a_removal_that_runs(
    uri: str, pushed: Callable[[str], str], meanwhile: Callable[[str, Callable[[], None]], None]
) -> None:
    one, _ = pushed("one"), pushed("two")
    seen: list[object] = []

    def others() -> None:
        before = signs(one)
        seen.extend(removal.collect(uri, lambda: NOBODY, 0.0, dry_run=True))
        collect(uri, Uses(frozenset({("guest/a", one)}), frozenset()))
        seen.append(signs(one) == before)
        with pytest.raises(Conflict, match="is being removed just now"):
            guards.begin_push(open_store(one))

    meanwhile("config.json", others)
    assert collect(uri) == {one: ""}
    assert seen[-1] is True
    assert open_store(one).objects() == {}


def test_a_dry_run_writes_nothing(uri: str, pushed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = pushed("one"), pushed("two")
    monkeypatch.setattr(type(open_store(uri)), "write", lambda *_: pytest.fail("a dry run wrote"))
    monkeypatch.setattr(type(open_store(uri)), "delete", lambda *_: pytest.fail("a dry run deleted"))
    assert [r.uri for r in removal.collect(uri, lambda: NOBODY, 0.0, dry_run=True)] == [one]


@pytest.mark.parametrize("file", [INDEX_NAME, "config.json", "model.safetensors"])
def test_a_removal_that_was_asleep_leaves_what_was_pushed_meanwhile(
    uri: str,
    pushed: Callable[[str], str],
    meanwhile: Callable[[str, Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    file: str,
) -> None:
    one, _ = pushed("one"), pushed("two")

    def push_past_it() -> None:
        with monkeypatch.context() as later:
            later.setattr(guards, "MARK_S", -1.0)
            guards.end_push(open_store(one), guards.begin_push(open_store(one)))
        again.append(one)

    again: list[str] = []
    read = type(open_store(one)).read

    def reading(store: Store, name: str) -> Iterator[bytes]:
        if name == INDEX_NAME and file == INDEX_NAME and not again:
            push_past_it()
        return read(store, name)  # type: ignore[arg-type]

    if file == INDEX_NAME:
        monkeypatch.setattr(type(open_store(one)), "read", reading)
    else:
        meanwhile(file, push_past_it)
    with pytest.raises(Conflict, match="is being pushed again"):
        collect(uri)
    assert again
    assert "tokenizer.json" in open_store(one).objects(), "it goes after the others, and stopped before"


def test_the_time_of_a_removal_goes_on_while_the_machine_sleeps(
    uri: str, pushed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    uri: str, pushed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    one, two = pushed("one"), pushed("two")
    kind = type(open_store(one))
    delete = kind.delete

    def cut(store: Store, name: str) -> None:
        if name == file:
            raise Cut
        delete(store, name)  # type: ignore[arg-type]

    with monkeypatch.context() as killed:
        killed.setattr(kind, "delete", cut)
        with pytest.raises(Cut):
            collect(uri)
    assert INDEX_NAME not in open_store(one).objects(), "hosts say that there is no such version"
    _verify(two)
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]


def test_who_names_the_version_while_it_goes_finds_it_again(uri: str, pushed: Callable[[str], str]) -> None:
    one, _ = pushed("one"), pushed("two")
    answers = iter([NOBODY, replace(NOBODY, actions=frozenset({("guest/late", one)}))])
    (found,) = removal.collect(uri, lambda: next(answers), 0.0, dry_run=False)
    assert found.kept == "guest/late uses it"
    _verify(one)


def test_a_platform_that_is_lost_in_the_middle_costs_nothing(uri: str, pushed: Callable[[str], str]) -> None:
    one, _ = pushed("one"), pushed("two")
    asked: list[int] = []

    def ask() -> Uses:
        asked.append(1)
        if len(asked) > 1:
            raise StoreUnavailable("the platform is away")
        return NOBODY

    with pytest.raises(StoreUnavailable):
        list(removal.collect(uri, ask, 0.0, dry_run=False))
    _verify(one)
    assert signs(one) == []


# ── delete ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_model_goes_with_all_of_its_versions(uri: str, pushed: Callable[[str], str]) -> None:
    pins = [pushed("one"), pushed("two")]
    removed = removal.delete(uri, lambda: NOBODY)
    assert [r.kept for r in removed] == ["", "", ""]
    for place in (*pins, uri):
        assert open_store(place).objects() == {}
    with pytest.raises(ModelNotFound):
        removal.delete(uri, lambda: NOBODY)


@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_on_s3_versions_go_and_then_the_model(uri: str, pushed: Callable[[str], str]) -> None:
    """A short form of the tests that run on both kinds of stores."""
    one, two = pushed("one"), pushed("two")
    assert collect(uri, Uses(frozenset({("guest/a", one)}), frozenset())) == {one: "guest/a uses it"}
    assert collect(uri) == {one: ""}
    assert there(uri) == [two]
    removal.delete(uri, lambda: NOBODY)
    assert (open_store(two).objects(), open_store(uri).objects()) == ({}, {})


@pytest.mark.parametrize("what", ["name", "pin", "runs"])
def test_what_is_used_is_not_deleted_and_the_names_are_told(uri: str, pushed: Callable[[str], str], what: str) -> None:
    one, two = pushed("one"), pushed("two")
    sha256 = checkpoints.read_index(open_store(one)).sha256
    uses = {
        "name": Uses(frozenset({("guest/a", uri)}), frozenset()),
        "pin": Uses(frozenset({("guest/a", one)}), frozenset()),
        "runs": Uses(frozenset(), frozenset({("guest/a", sha256)})),
    }[what]
    with pytest.raises(Conflict, match="is used by guest/a"):
        removal.delete(uri, lambda: uses)
    for pin in (one, two):
        _verify(pin)
    assert removal.versions_of(uri)[-1].newest or removal.versions_of(uri)[0].newest


def test_one_version_is_deleted_unless_it_is_the_newest_or_used(uri: str, pushed: Callable[[str], str]) -> None:
    one, two = pushed("one"), pushed("two")
    with pytest.raises(Conflict, match="it is the newest one"):
        removal.delete(two, lambda: NOBODY)
    with pytest.raises(Conflict, match="guest/a uses it"):
        removal.delete(one, lambda: Uses(frozenset({("guest/a", one)}), frozenset()))
    removal.delete(one, lambda: NOBODY)
    assert there(uri) == [two]
    with pytest.raises(ModelNotFound, match="there is no version"):
        removal.delete(one, lambda: NOBODY)


def test_a_directory_that_was_not_pushed_goes_without_the_files_of_others(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("x")
    removal.delete(tmp_path.as_uri(), lambda: NOBODY)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_what_was_pushed_while_the_model_went_stays(
    uri: str, pushed: Callable[[str], str], meanwhile: Callable[[str, Callable[[], None]], None]
) -> None:
    pushed("one")
    late: list[str] = []
    meanwhile("config.json", lambda: late.append(pushed("two")))
    with pytest.raises(Conflict, match="has been pushed again meanwhile"):
        removal.delete(uri, lambda: NOBODY)
    assert [(v.uri, v.newest) for v in removal.versions_of(uri)] == [(late[0], True)]
    _verify(late[0])


@pytest.mark.parametrize("answers", [2, 3, 4])
def test_a_platform_that_is_lost_while_a_model_goes_costs_nothing(
    uri: str, pushed: Callable[[str], str], answers: int
) -> None:
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
    thaw: Run, gateway: FakeGateway, tmp_path: Path, pushed: Callable[[str], str], uri: str
) -> None:
    one, two = pushed("one"), pushed("two")
    at = ("--apihost", gateway.url, "--auth", KEY)
    uses = {"actions": [{"action": "guest/a", "version": "0.0.1", "uri": one}], "running": []}
    gateway.answers["GET /api/v1/thaw/models"] = (200, uses)
    listed = thaw("model", "versions", uri, *at).stdout
    assert "guest/a" in listed
    assert "newest" in listed
    refused = thaw("model", "delete", uri, *at)
    assert (refused.returncode, f"{uri} is used by guest/a" in refused.stderr) == (153, True), refused.stderr
    assert f"{one} stays: guest/a uses it" in thaw("model", "gc", uri, "--older-than", "0", *at).stdout
    gateway.answers["GET /api/v1/thaw/models"] = (200, {"actions": [], "running": []})
    assert f"{one} would go" in thaw("model", "gc", uri, "--older-than", "0", "--dry-run", *at).stdout
    assert "ok: 1 versions" in thaw("model", "gc", uri, "--older-than", "0", *at).stdout
    assert there(uri) == [two]
    unknown = thaw("model", "delete", uri)
    assert "nobody knows which functions use this model" in unknown.stderr
    assert there(uri) == [two]
    assert thaw("model", "delete", uri, "--force").returncode == 0
    assert not (tmp_path / "store" / "m").exists()


@pytest.mark.parametrize("uri", ["file"], indirect=True)
def test_the_base_and_the_adapter_of_a_function_are_both_used_by_it(
    thaw: Run, gateway: FakeGateway, pushed: Callable[[str], str], uri: str
) -> None:
    one, two = pushed("one"), pushed("two")
    at = ("--apihost", gateway.url, "--auth", KEY)
    rows = [{"action": "guest/a", "version": "0.0.1", "uri": name} for name in (one, "s3://models/another")]
    gateway.answers["GET /api/v1/thaw/models"] = (200, {"actions": rows, "running": []})
    assert f"{one} stays: guest/a uses it" in thaw("model", "gc", uri, "--older-than", "0", *at).stdout
    refused = thaw("model", "delete", uri, *at)
    assert (refused.returncode, f"{uri} is used by guest/a" in refused.stderr) == (153, True), refused.stderr
    assert set(there(uri)) == {one, two}
