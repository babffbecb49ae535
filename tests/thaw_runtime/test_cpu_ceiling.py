"""A ceiling for the processor's instructions: vLLM and its libraries see nothing above it, in every process of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.thaw_runtime.conftest import ROOT, Zygote, forked_container
from tests.thaw_runtime.models import real_model
from tests.thaw_runtime.test_vllm import CAPITAL, answer, children
from thaw.dev.known_answers import FRANCE
from thaw.settings import SettingError
from thaw_runtime.engine.vllm import cpu_ceiling
from thaw_runtime.engine.vllm.kernels import library_of
from thaw_runtime.engine.vllm.settings import CEILINGS, CPU_CEILING, engine_settings

XEON = {
    "architecture": "x86_64",
    "avx2": True,
    "avx512_f": True,
    "avx512_bf16": True,
    "avx512_fp16": True,
    "amx_tile": True,
}
LIBRARIES = {"avx2": "_C_AVX2", "avx512": "_C_AVX512", "avx512_bf16": "_C", "": "_C"}


@pytest.mark.parametrize("ceiling", ["", *CEILINGS])
def test_what_lies_above_a_ceiling_is_missing_and_the_rest_is_as_it_was(ceiling: str) -> None:
    gone = {
        "": set[str](),
        "avx2": {"avx512_f", "avx512_bf16", "avx512_fp16", "amx_tile"},
        "avx512": {"avx512_bf16", "avx512_fp16", "amx_tile"},
        "avx512_bf16": {"avx512_fp16", "amx_tile"},
    }[ceiling]
    seen = cpu_ceiling.below(ceiling, XEON)
    assert seen == {name: has if name not in gone else False for name, has in XEON.items()}
    assert library_of(seen) == LIBRARIES[ceiling]


def test_a_ceiling_that_does_not_exist_is_refused_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CPU_CEILING, "sse2")
    with pytest.raises(SettingError, match="THAW_CPU_CEILING='sse2' is not a ceiling") as caught:
        engine_settings()
    assert caught.value.hint == "set it to one of: avx2, avx512, avx512_bf16"


@pytest.mark.vllm
def test_below_the_lowest_ceiling_the_library_of_the_oldest_processors_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zygote's forks keep its ceiling, and `thaw dev doctor` names the library that they have loaded."""
    monkeypatch.setenv(CPU_CEILING, "avx2")
    zygote = Zygote(tmp_path)
    try:
        with forked_container(zygote, tmp_path / "c", real_model()) as container:
            assert container.init()[0] == 200
            assert answer(container, CAPITAL) == FRANCE.text
            (engine,) = children(container.forked["pid"])
            assert "vllm/_C_AVX2." in Path(f"/proc/{engine}/maps").read_text()
    finally:
        zygote.close()
    command = [sys.executable, "-m", "thaw_runtime.engine.describe"]
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert "vllm/_C_AVX2 on cpu; products by float32, block by block" in told
    assert "; attention by vec; ceiling avx2" in told


def test_torch_says_what_is_below_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: XEON)
    cpu_ceiling.limit_torch("avx512")
    assert torch.cpu._is_avx512_supported()
    assert not torch.cpu._is_avx512_bf16_supported()
    assert not torch.cpu._is_amx_tile_supported()
