"""bench/pods.py begins a measured start when no stem cell is being made."""

from __future__ import annotations

import pytest

from bench.pods import all_have_cells
from thaw.action import KIND_LLM, KIND_PYTHON
from thaw.host import HostReport, StemTarget
from thaw.ids import HostId

KEEPS_BOTH = (StemTarget(KIND_PYTHON, 1, 0), StemTarget(KIND_LLM, 1, 0))
KEEPS_PYTHON = (StemTarget(KIND_PYTHON, 1, 0), StemTarget(KIND_LLM, 0, 0))


def host(*waiting: str, keeps: tuple[StemTarget, ...] = KEEPS_BOTH) -> HostReport:
    return HostReport(
        HostId("h"), "b", "h:1", (), 2, 1e9, "none", "process", 0, 0, stem_kinds=waiting, stem_targets=keeps
    )


WHOLE, MAKES, HAS_NONE = host(KIND_PYTHON, KIND_LLM), host(KIND_PYTHON), host(KIND_PYTHON, keeps=KEEPS_PYTHON)


@pytest.mark.parametrize(
    ("hosts", "begins"),
    [([WHOLE, MAKES], False), ([WHOLE, WHOLE], True), ([WHOLE, HAS_NONE], True), ([], False), ([HAS_NONE], False)],
    ids=["it makes its cell again", "all have cells", "it shall have none", "nobody", "no cell anywhere"],
)
def test_a_start_begins_when_it_finds_a_cell_and_no_node_makes_its_cell_again(
    hosts: list[HostReport], begins: bool
) -> None:
    assert all_have_cells(hosts) is begins
