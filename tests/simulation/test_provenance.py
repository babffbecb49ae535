"""A report records the code that it was made with, and the program notices that this code has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench._common import ROOT
from bench.simulation import provenance
from bench.simulation.provenance import essence
from tests.simulation.test_files import simulated

POLICY = '''"""Chooses."""

from thaw.ids import HostId


def choose(hosts: list[HostId]) -> HostId:
    """The first one."""
    if len(hosts) > 1:
        hosts.sort()  # by name
        hosts.reverse()
    return hosts[0]
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with a simulator, and with a policy of one file."""
    write(tmp_path, "bench/simulation/matrix.py", "from gateway.scheduler.policy import decide\nfrom thaw import ids\n")
    write(tmp_path, "gateway/scheduler/policy/decide.py", POLICY)
    write(tmp_path, "gateway/scheduler/loop.py", "import redis\n")
    write(tmp_path, "thaw/ids.py", "HostId = str\n")
    record(tmp_path)
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def record(root: Path) -> None:
    """Write the record that the program writes with its report."""
    made_with = provenance.present(root)
    write(root, str(provenance.RECORD), json.dumps({"commit": "commit 1234567", "modules": dict(made_with.digests)}))


def test_code_that_did_not_change_is_said_not_to_have(tree: Path) -> None:
    assert provenance.news(tree) == "docs/simulation.md was made with commit 1234567; no policy code has changed since."


def test_a_change_of_the_policy_is_noticed_and_named(tree: Path) -> None:
    write(tree, "gateway/scheduler/policy/decide.py", POLICY.replace("> 1", "> 2"))
    assert provenance.news(tree) == (
        "docs/simulation.md was made with commit 1234567; policy code has changed since in 1 module(s), "
        "gateway.scheduler.policy.decide: run make simulation"
    )


def test_a_file_of_the_policy_that_is_new_or_gone_is_noticed(tree: Path) -> None:
    write(tree, "gateway/scheduler/policy/decide.py", POLICY + "\n\nfrom gateway.scheduler import more\n")
    write(tree, "gateway/scheduler/more.py", "MOST = 3\n")
    assert "in 1 module(s), gateway.scheduler.more:" in provenance.news(tree)
    record(tree)
    write(tree, "gateway/scheduler/policy/decide.py", POLICY)
    assert "in 1 module(s), gateway.scheduler.more:" in provenance.news(tree)


def test_a_file_that_moved_and_what_does_no_scheduling_are_no_news(tree: Path) -> None:
    (tree / "gateway/scheduler/policy/decide.py").rename(tree / "gateway/scheduler/choosing.py")
    write(tree, "bench/simulation/matrix.py", "from gateway.scheduler import choosing\nfrom thaw import ids\n")
    write(tree, "gateway/scheduler/loop.py", "import asyncio\n")
    write(tree, "thaw/ids.py", "HostId = bytes\n")
    assert provenance.news(tree).endswith("no policy code has changed since.")


def test_a_report_that_names_no_code_is_to_be_made_again(tree: Path) -> None:
    (tree / provenance.RECORD).write_text('{"constants": "1"}')
    assert provenance.news(tree) == ("docs/simulation.md does not say which code it was made with: run make simulation")


def test_comments_docstrings_imports_and_spaces_decide_nothing() -> None:
    said_otherwise = (
        POLICY.replace("Chooses.", "Chooses a host.")
        .replace("# by name", "# so that ties go to the least name")
        .replace("hosts: list[HostId]", "hosts:  list[HostId]")
        .replace("from thaw.ids", "from thaw.names")
    )
    assert said_otherwise != POLICY
    assert essence(said_otherwise) == essence(POLICY)


@pytest.mark.parametrize(
    ("before", "after"),
    [("> 1", "> 2"), ("        hosts.reverse()", "    hosts.reverse()"), ("hosts[0]", "hosts[-1]")],
    ids=["a number", "an indentation", "a sign"],
)
def test_what_decides_something_changes_the_digest(before: str, after: str) -> None:
    assert essence(POLICY.replace(before, after)) != essence(POLICY)


def test_the_policy_is_in_it_and_what_does_its_io_is_not() -> None:
    modules = provenance.present().digests
    policy = {f"gateway.scheduler.{name}" for name in ("policy.decide", "placement.select", "placement.link_ledger")}
    assert policy | {"thaw.partition", "bench.simulation.production", "bench.simulation.constants"} <= modules.keys()
    assert not {"gateway.scheduler.loop", "gateway.scheduler.io.effects", "bench.simulation.report"} & modules.keys()


def test_make_check_says_it() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    assert "bench/simulate.py --changed" in recipe
    done = simulated("--changed")
    assert (done.returncode, done.stdout.strip()) == (0, provenance.news())
