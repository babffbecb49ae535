"""Requests that go on sampling as if never interrupted: seeded generators and penalties, on the stage that samples.

This file uses fields of vLLM's model runner and of its batch, but imports no vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Continuation:
    """A request whose prompt ends with tokens it generated elsewhere."""

    output_so_far: list[int]
    rewound: bool = False  # its generator has made the draws of the uninterrupted run


class Continuations:
    """The continued requests of one engine, by request id."""

    def __init__(self) -> None:
        self._open: dict[str, Continuation] = {}

    def begin(self, request_id: str, output_so_far: tuple[int, ...], *, rewound: bool = False) -> None:
        if output_so_far:
            self._open[request_id] = Continuation(list(output_so_far), rewound)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def before_sampling(self, runner: Any) -> None:
        """Between forward pass and sampling, give each continued request the state of an uninterrupted run."""
        batch = getattr(runner, "input_batch", None)
        if batch is None or not hasattr(batch, "generators"):
            return
        for request_id, continuation in self._open.items():
            row = batch.req_id_to_index.get(request_id)
            if row is not None:
                _continue(batch, row, continuation, runner.requests[request_id].output_token_ids)
        _keep_discarded_draws(runner, batch)


def _continue(batch: Any, row: int, continuation: Continuation, generated_here: list[int]) -> None:
    generator = batch.generators.get(row)
    if generator is not None and not continuation.rewound:
        for _ in continuation.output_so_far:  # vLLM's sampler on the CPU draws once a token
            torch.randint(0, 2**31, (1,), generator=generator)
    continuation.rewound = True
    penalised = batch.sampling_metadata.output_token_ids
    if penalised:  # penalties apply to the whole output, not only to what was generated here
        penalised[row] = [*continuation.output_so_far, *generated_here]


def _keep_discarded_draws(runner: Any, batch: Any) -> None:
    """Give requests a generator that can be rewound.  Each chunk of a prompt samples, even if it is not the last one;
    vLLM then rewinds the generator, with a call that CPU generators lack.
    """
    for row in runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]:
        generator = batch.generators.get(int(row))
        if generator is not None and generator.device.type != "cpu":
            continue  # it has the calls itself
        if generator is not None and not isinstance(generator, Rewindable):
            batch.generators[int(row)] = generator = Rewindable.of(generator)
            runner.requests[batch.req_ids[int(row)]].generator = generator
        if generator is not None:
            generator.mark()


class Rewindable(torch.Generator):
    """A CPU generator with the offset calls of a CUDA one: ``set_offset`` goes back to the last ``mark``."""

    @classmethod
    def of(cls, generator: torch.Generator) -> Rewindable:
        made = cls()
        made.set_state(generator.get_state())
        return made

    def mark(self) -> None:
        self._marked = self.get_state()

    def get_offset(self) -> int:
        return 4  # vLLM subtracts this, the cost of one draw on CUDA

    def set_offset(self, offset: int) -> None:
        self.set_state(self._marked)
