"""The names that the platform's messages use for the simulator's servers, functions and requests."""

from __future__ import annotations

from bench.simulation.cluster import SimServer
from bench.simulation.constants import KEEP_ALIVE_S, KV_RESERVE, SLOTS
from bench.simulation.system import Function
from bench.simulation.workload import Request
from gateway.scheduler.events import ActionFacts
from thaw.action import KIND_LLM
from thaw.ids import ActionName, ActivationId, HostId


def host(server: SimServer) -> HostId:
    return HostId(f"host-{server.index:04d}")


def name(function: Function) -> ActionName:
    return ActionName(f"guest/f{function.index}")


def function_of(action: ActionName) -> int:
    return int(action.removeprefix("guest/f"))


def uri(function: int) -> str:
    return f"s3://models/{function}"


def activation(request: Request) -> ActivationId:
    return ActivationId(f"{request.index:032x}")


def action(function: Function, max_stages: int, forced_stages: int | None) -> ActionFacts:
    need = function.model.n_bytes + KV_RESERVE
    return ActionFacts(
        name(function),
        "0.0.1",
        KIND_LLM,
        need,
        SLOTS,
        1000,
        KEEP_ALIVE_S,
        model_uri=uri(function.index),
        max_stages=max_stages,
        forced_stages=forced_stages,
        slo_ttft_s=function.slo_ttft,
        slo_tpot_s=function.slo_tpot,
    )
