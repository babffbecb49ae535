"""Pipelines of the small real model on a platform of their own: the time per token of stages that share a core.

Every stage computes with one thread.  All stages and the relay run on one core; the gateway, the hosts' daemons and the
client run on the others.  A pipeline then cannot be faster than one worker.  The additional time belongs to the relay
and to the stages themselves: messages between stages, and steps that each do less work.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench import _paths, _shared_cores
from bench._common import median, say
from bench._platform import BenchPlatform, llm_config
from bench._processes import pin
from bench._sse import Caller

_PROMPT: Final = "Write a short story about a traveller who carries a lantern through a valley at night."
_TOKENS: Final = 64
_WHOLE_MB: Final = 2048
DEVICE_MB: Final = 8192
"""The device memory that a host declares.  A group's model requests more than that, so all workers of the group are low
workers and the group stays a pipeline.
"""


class Pipelines:
    def __init__(self, platform: BenchPlatform, uri: str, engine_core: int) -> None:
        self.platform, self._uri, self._core = platform, uri, engine_core
        self.paths: dict[str, str] = {}  # the path of the last warm-up answer, by the name of a deployed pipeline
        relay_port = urlsplit(platform.platform.relay_url).port
        for pid, line in platform.pids().items():
            if "valkey-server" in line and f":{relay_port}" in line:
                pin(pid, engine_core)

    @contextlib.contextmanager
    def deployed(self, name: str, n_stages: int, transport: str) -> Iterator[Caller]:
        """Deploy a pipeline, warm it and pin its stages.  Yields a caller, and removes the pipeline at the end."""
        config = llm_config(self._uri, stages=n_stages, max_stages=n_stages)
        config["transport"] = transport
        config["resources"]["gpu_memory_mb"] = _WHOLE_MB if n_stages == 1 else DEVICE_MB + 1024
        before, others = frozenset(c.name for c in _shared_cores.containers(self.platform)), self.platform.n_instances()
        self.platform.deploy(name, config)
        caller = self.platform.caller(name)
        try:
            caller.chat(_PROMPT, 8)
            self._place(before)
            warm = caller.chat(_PROMPT, 8)
            claimed = _paths.expected(transport, direct=self.platform.options.direct)
            self.paths[name] = _paths.of_answer(self.platform, warm.activation_id, n_stages, claimed)
            yield caller
        finally:
            caller.close()
            self.platform.remove(name, others=others)

    def _place(self, before: frozenset[str]) -> None:
        """Pin the new containers to the core, and give each a quota of one whole core.

        A low worker would otherwise be limited to a part of a core.
        """
        with _shared_cores.capped(self.platform, 1.0):
            for container in _shared_cores.containers(self.platform):
                for pid in container.pids if container.name not in before else ():
                    pin(pid, self._core)


def tpot_ms(caller: Caller) -> float:
    """The mean time between the tokens of one greedy answer."""
    answer = caller.chat(_PROMPT, _TOKENS, ignore_eos=True)
    if answer.completion_tokens != _TOKENS:
        raise SystemExit(f"an answer of {answer.completion_tokens} tokens, {_TOKENS} were asked for")
    return (answer.arrivals_s[-1] - answer.arrivals_s[0]) / (_TOKENS - 1) * 1e3


def decode_bytes(model: Path) -> int:
    """The bytes that a stage sends to the next per token: hidden states and residual in bf16, step and descriptors."""
    config = json.loads((model / "config.json").read_text())
    return 2 * 2 * int(config["hidden_size"]) + 250


def table(pipelines: Pipelines, transports: Sequence[str], sizes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """TPOT in ms of one worker and of every size of pipeline on each transport, ``rounds`` values each.

    A pipeline takes turns with the one worker, so a slow minute of the machine affects both.
    """
    found: dict[str, list[float]] = {}
    with pipelines.deployed("one", 1, "auto") as one:
        for transport in transports:
            for n_stages in sizes:
                name = f"s={n_stages} {transport}"
                with pipelines.deployed(f"{transport}-{n_stages}", n_stages, transport) as several:
                    for _ in range(rounds):
                        found.setdefault(beside(name), []).append(tpot_ms(one))
                        found.setdefault(name, []).append(tpot_ms(several))
                alone = median(found[beside(name)])
                say(
                    f"  {name:12} {median(found[name]):7.2f} ms a token, s=1 beside it {alone:7.2f}, "
                    f"path {pipelines.paths[f'{transport}-{n_stages}']}"
                )
    return found


def beside(name: str) -> str:
    """The name of the one worker's values that were measured in turn with the pipeline ``name``."""
    return f"s=1 beside {name}"
