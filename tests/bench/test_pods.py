"""bench/pods.py begins a measured start when no stem cell is being made."""

from __future__ import annotations

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


def test_a_node_that_makes_its_cell_again_is_waited_for() -> None:
    assert not all_have_cells([host(KIND_PYTHON, KIND_LLM), host(KIND_PYTHON)])
    assert all_have_cells([host(KIND_PYTHON, KIND_LLM), host(KIND_PYTHON, KIND_LLM)])


def test_a_host_that_shall_have_no_cell_of_a_kind_is_not_waited_for() -> None:
    assert all_have_cells([host(KIND_PYTHON, KIND_LLM), host(KIND_PYTHON, keeps=KEEPS_PYTHON)])


def test_a_start_finds_a_cell_somewhere() -> None:
    assert not all_have_cells([])
    assert not all_have_cells([host(KIND_PYTHON, keeps=KEEPS_PYTHON)])
