"""``thaw model inspect`` and ``thaw model push`` with a model of a hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.cli.conftest import Run
from tests.fetchd.harness import write_model
from tests.hub import Answering, LoopbackHub, files_in
from thaw.cli.model_stores.hub import HubStore, copied
from thaw.errors import Conflict

URI = "hf://org/base"
Ask = Callable[..., CompletedProcess[str]]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return files_in(write_model(tmp_path / "made", layer_bytes=5_000_000))


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[LoopbackHub]:
    with LoopbackHub(page_size=2) as running:
        running.add("org/base", {**files, "README.md": b"#", "evil.py": b"raise SystemExit"})
        running.add("org/gated", files, opens=frozenset({"t"}), is_gated=True)
        running.tokens = {"t"}
        yield running


@pytest.fixture
def ask(thaw: Run, hub: LoopbackHub) -> Ask:
    def run(*words: str, token: str = "") -> CompletedProcess[str]:
        return thaw("model", *words, env={"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": token})

    return run


def test_inspect_tells_the_commit_the_layers_and_the_files_without_fetching_them(
    ask: Ask, hub: LoopbackHub, files: dict[str, bytes]
) -> None:
    done = ask("inspect", URI)
    assert done.returncode == 0, done.stderr
    assert f"newest   {URI}@{hub.repositories['org/base'].branches['main']}" in done.stdout
    assert "layers   3, 4.77 MiB the largest" in done.stdout
    assert f"model.safetensors  {len(files['model.safetensors'])}" in done.stdout
    assert "evil" not in done.stdout
    assert hub.sent_bytes < 100_000


def test_a_model_of_a_hub_is_copied_into_a_store_of_ours_and_a_copy_that_was_cut_goes_on(
    ask: Ask, hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    target = (tmp_path / "x").as_uri()
    weights = files["model.safetensors"]

    def cut(answering: Answering) -> bool:
        if answering.name != "store" or answering.span == (0, 64 * 1024 - 1):
            return False
        if answering.span is not None and answering.span[0] == 0:
            answering.give(weights, cut=9 << 20)
        else:
            answering.tell(500)
        return True

    hub.fault = cut
    stopped = ask("push", URI, target)
    assert stopped.returncode != 0
    assert "the hub answered 500" in stopped.stderr
    hub.fault = lambda a: False
    hub.asked.clear()
    done = ask("push", URI, target)
    assert done.returncode == 0, done.stderr
    (rest,) = [a.first for a in hub.asked if a.server == "store" and a.first]
    assert rest == 9 << 20
    assert ask("verify", target).returncode == 0
    (place,) = tmp_path.glob("x@*")
    assert {p.name: p.read_bytes() for p in place.iterdir() if p.name != "thaw-index.json"} == files
    assert not list(tmp_path.rglob("org--base@*/*")), "the copy is gone"


def test_a_copy_is_one_request_for_each_file_and_outlives_a_pause_and_a_break(
    ask: Ask, hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    troubles = iter(["busy", "cut"])

    def trouble(answering: Answering) -> bool:
        if answering.name != "store" or answering.span == (0, 64 * 1024 - 1):
            return False
        kind = next(troubles, "")
        if kind == "busy":
            answering.tell(429, Retry_After="0")
        elif kind == "cut":
            answering.give(files["model.safetensors"], cut=5 << 20)
        return kind != ""

    hub.fault = trouble
    done = ask("push", URI, (tmp_path / "x").as_uri())
    assert done.returncode == 0, done.stderr
    assert [a.first for a in hub.asked if a.server == "store"] == [0, 0, 0, 5 << 20]


def test_a_store_that_ignores_ranges_is_not_read_whole(ask: Ask, hub: LoopbackHub, files: dict[str, bytes]) -> None:
    hub.fault = lambda a: a.name == "store" and a.tell(200, files["model.safetensors"]) is None
    assert "does not serve ranges" in ask("inspect", URI).stderr


def test_two_copies_of_one_model_do_not_write_one_file(
    hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    store = HubStore(URI)
    with copied(store, tmp_path / "cache", lambda _: None) as directory:
        assert files_in(directory) == files
        other = copied(HubStore(URI), tmp_path / "cache", lambda _: None)
        with pytest.raises(Conflict, match="another process copies"), other:
            raise AssertionError
        assert files_in(directory) == files


def test_a_list_that_goes_on_elsewhere_gets_no_token_there(ask: Ask, hub: LoopbackHub) -> None:
    with LoopbackHub() as other:
        place = other.endpoint.partition(":")[2]
        hub.fault = lambda a: "/tree/" in a.path and a.tell(200, b"[]", Link=f'<{place}/x>; rel="next"') is None
        told = ask("inspect", URI, token="t").stderr
        assert f"goes on at {other.endpoint}" in told
        assert f"set HF_ENDPOINT to {other.endpoint}" in told
        assert other.asked == []


def test_a_list_has_a_limit(ask: Ask, hub: LoopbackHub) -> None:
    hub.fault = lambda a: "/tree/" in a.path and a.tell(200, b"[]", Link=f'<{a.path}>; rel="next"') is None
    assert "more than 32 pages" in ask("inspect", URI).stderr
    hub.fault = lambda a: "/tree/" in a.path and a.tell(200, b"[" + b" " * (9 << 20) + b"]") is None
    assert "list of its files is too long" in ask("inspect", URI).stderr


def test_bytes_that_are_not_those_that_the_hub_lists_are_not_pushed(
    ask: Ask, hub: LoopbackHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    lie = files["model.safetensors"][:-1] + b"!"
    hub.fault = lambda a: a.name == "store" and a.give(lie) is None
    done = ask("push", URI, (tmp_path / "x").as_uri())
    assert "model.safetensors is not the file that the hub lists" in done.stderr
    assert not list(tmp_path.glob("x*"))


def test_a_token_opens_a_gated_model_and_goes_to_no_store(ask: Ask, hub: LoopbackHub, home: Path) -> None:
    shut = ask("inspect", "hf://org/gated")
    assert "hf://org/gated is gated, and its authors want to see a token" in shut.stderr
    assert f"hint: request access at {hub.endpoint}/org/gated, then set HF_TOKEN" in shut.stderr
    assert ask("inspect", "hf://org/gated", token="t").returncode == 0
    assert {a.token for a in hub.asked if a.server == "store"} == {""}
    (home / ".netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    (home / ".netrc").chmod(0o600)
    assert ask("inspect", "hf://org/gated", token="t").returncode == 0
    assert {a.token for a in hub.asked if a.server == "hub"} == {"", "t"}, "no entry of netrc takes its place"


def test_verify_says_what_gives_a_model_of_a_hub_the_checksums_that_it_compares(ask: Ask, hub: LoopbackHub) -> None:
    done = ask("verify", URI)
    assert "has no thaw-index.json" in done.stderr
    assert f"thaw model push {URI}@{hub.repositories['org/base'].branches['main']} s3://…" in done.stderr


def test_nothing_is_pushed_to_a_hub(ask: Ask, tmp_path: Path) -> None:
    done = ask("push", str(tmp_path / "made"), URI)
    assert "is read only" in done.stderr


@pytest.mark.parametrize("command", [("versions",), ("delete", "--force")])
def test_the_revisions_of_a_hub_are_its_own(ask: Ask, hub: LoopbackHub, command: tuple[str, ...]) -> None:
    done = ask(command[0], URI, *command[1:])
    assert done.returncode != 0
    assert "a hub keeps the revisions of its models itself" in done.stderr
    assert f"they are at {hub.endpoint}/org/base" in done.stderr
