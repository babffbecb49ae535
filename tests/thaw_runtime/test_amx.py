"""An engine on a processor with AMX, which vLLM uses for attention and for small layers.  AMX cannot be emulated here, so
on another processor these tests only say that they did not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.thaw_runtime.conftest import Forked
from tests.thaw_runtime.models import real_model
from tests.thaw_runtime.test_vllm import CAPITAL, answer, fork, trickle
from thaw.dev.known_answers import COUNTING, FRANCE
from thaw_runtime.engine.vllm.kernels import kernels

__all__ = ["fork"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cpu.get_capabilities().get("amx_tile"), reason="this processor has no AMX"),
]


def test_the_report_of_the_kernels_names_amx() -> None:
    found = kernels()
    assert (found.library, found.attention) == ("vllm/_C", "amx")
    assert found.products.endswith(", AMX for small layers")


def test_an_engine_on_amx_that_computes_before_its_weights_are_there_answers(fork: Callable[..., Forked]) -> None:
    """It rehearses a batch with some layers packed by vLLM's kernels and the others not yet."""
    container = fork(real_model(), arrived=False)
    feeder = threading.Thread(target=trickle, args=(container.descriptor_socket,))
    feeder.start()
    status, reply = container.init()
    feeder.join()
    assert status == 200, reply
    assert next(e["attrs"]["rehearsal_s"] for e in reply["events"] if e["name"] == "load.end") > 0
    assert answer(container, CAPITAL) == FRANCE.text
    text = answer(container, {"prompt": COUNTING.prompt, "max_tokens": 64, "temperature": 0}, "completions")
    assert text == COUNTING.text
