"""Plant small faults in the code, one at a time, and count how many of them the tests notice.

::

    make mutants                                    every module of the table, a fixed sample of its mutants
    python scripts/mutants.py ledger turns          the modules whose names contain one of these words
    python scripts/mutants.py --most 0 --modules pure   every mutant of the pure modules
    python scripts/mutants.py --faults aftermath        what is given back and done after an error (aftermath.py)

mutmut supplies the mutations: the substitutes for a number, an operator, an argument.  This script does the rest,
because mutmut has neither a sample nor a seed, leaves out every decorated function, and runs one set of tests for all
modules (docs/decisions/0015-mutants.md).  Each worker has a copy of the working tree, so a test that starts processes
runs the mutant in them too.  The table below names the tests of each module.  A mutant is finished when the first of
these tests fails, or at a deadline in proportion to the time that they take without a fault.

The bodies of functions are mutated.  The wording of messages, log lines, assertions and annotations is left out,
because no caller depends on it.  The constants of a module are left out too, because they are tuned by measurements.

The last line printed is JSON.  The exit status is 1 when the tests noticed fewer than nine in ten.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import aftermath
import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

ROOT: Final = Path(__file__).resolve().parents[1]
SEED: Final = 20_260_701
WANTED: Final = 0.9
_WORDING: Final = {"operator_string"}
_SLACK_S: Final = 15.0
"""The deadline is this much later than five times the tests' time without a fault.  A mutant that waits for ever is
noticed by the deadline.
"""

SCHEDULER: Final = "tests/scheduler"
POLICY: Final = tuple(
    f"{SCHEDULER}/test_policy{part}.py"
    for part in ("", "_versions", "_failures", "_hosts", "_successor", "_properties")
)
PURE: Final[dict[str, tuple[str, ...]]] = {
    "fetchd/backoff.py": ("tests/fetchd/test_parts.py",),
    "fetchd/chunks.py": ("tests/fetchd/test_parts.py",),
    "fetchd/meter.py": ("tests/fetchd/test_meter.py",),
    "gateway/scheduler/view/shortest_times.py": (f"{SCHEDULER}/test_bound.py", f"{SCHEDULER}/test_effects.py"),
    "gateway/scheduler/view/bound_terms.py": (f"{SCHEDULER}/test_bound.py", f"{SCHEDULER}/test_bound_plans.py"),
    "gateway/scheduler/policy/draining.py": (f"{SCHEDULER}/test_draining.py",),
    "gateway/scheduler/policy/evictions.py": (f"{SCHEDULER}/test_evictions.py", *POLICY),
    "gateway/scheduler/view/history.py": (
        f"{SCHEDULER}/test_predict.py",
        f"{SCHEDULER}/test_cells.py",
        f"{SCHEDULER}/test_kinds.py",
        f"{SCHEDULER}/test_effects.py",
        *POLICY,
    ),
    "gateway/scheduler/view/host_index.py": (
        f"{SCHEDULER}/test_ambiguities.py",
        f"{SCHEDULER}/test_groups.py",
        f"{SCHEDULER}/test_group_lives.py",
        f"{SCHEDULER}/test_index.py",
    ),
    "gateway/scheduler/placement/link_ledger.py": (f"{SCHEDULER}/test_ledger.py",),
    "gateway/scheduler/view/links.py": (f"{SCHEDULER}/test_links.py", f"{SCHEDULER}/test_index.py"),
    "gateway/scheduler/io/gc_pauses.py": (f"{SCHEDULER}/test_pauses.py",),
    "gateway/scheduler/policy/place.py": (
        f"{SCHEDULER}/test_ambiguities.py",
        f"{SCHEDULER}/test_bound_plans.py",
        f"{SCHEDULER}/test_groups.py",
        f"{SCHEDULER}/test_group_lives.py",
        f"{SCHEDULER}/test_kinds.py",
        f"{SCHEDULER}/test_resident.py",
        f"{SCHEDULER}/test_pools.py",
        *POLICY,
    ),
    "gateway/scheduler/placement/pool_account.py": (
        f"{SCHEDULER}/test_pool_account.py",
        f"{SCHEDULER}/test_pools.py",
        f"{SCHEDULER}/test_pool_promises.py",
    ),
    "gateway/scheduler/policy/pools.py": (f"{SCHEDULER}/test_pools.py", f"{SCHEDULER}/test_pool_promises.py"),
    "gateway/scheduler/placement/predict.py": (f"{SCHEDULER}/test_predict.py", f"{SCHEDULER}/test_select.py"),
    "gateway/scheduler/placement/window.py": (f"{SCHEDULER}/test_scaling.py",),
    "gateway/scheduler/placement/schemes.py": (f"{SCHEDULER}/test_select.py", f"{SCHEDULER}/test_ambiguities.py"),
    "gateway/scheduler/placement/search.py": (f"{SCHEDULER}/test_select.py", f"{SCHEDULER}/test_ambiguities.py"),
    "gateway/scheduler/placement/select.py": (f"{SCHEDULER}/test_select.py", f"{SCHEDULER}/test_ambiguities.py"),
    "gateway/scheduler/placement/stage_bytes.py": (
        f"{SCHEDULER}/test_stages.py",
        f"{SCHEDULER}/test_groups.py",
        f"{SCHEDULER}/test_group_lives.py",
        f"{SCHEDULER}/test_pools.py",
        f"{SCHEDULER}/test_index.py",
        f"{SCHEDULER}/test_resident.py",
    ),
    "gateway/scheduler/policy/starts.py": (
        *POLICY,
        f"{SCHEDULER}/test_groups.py",
        f"{SCHEDULER}/test_group_lives.py",
        f"{SCHEDULER}/test_pools.py",
        f"{SCHEDULER}/test_reasons.py",
        f"{SCHEDULER}/test_kinds.py",
    ),
    "gateway/scheduler/policy/successors.py": (
        f"{SCHEDULER}/test_successors.py",
        f"{SCHEDULER}/test_groups.py",
        f"{SCHEDULER}/test_group_lives.py",
        f"{SCHEDULER}/test_pools.py",
    ),
    "gateway/scheduler/view/waiting_line.py": (f"{SCHEDULER}/test_turns.py", *POLICY),
    "gateway/serving/routing/throttle.py": (
        "tests/gateway/test_throttle.py",
        "tests/gateway/test_queue_caps.py::test_a_request_is_refused_where_its_actions_or_its_namespaces_queue_is_full",
    ),
    "invoker/containers/instance.py": ("tests/invoker/test_instance.py",),
    "invoker/drivers/activation_logs.py": ("tests/invoker/test_logs.py",),
    "invoker/drivers/cpu_shares.py": ("tests/invoker/test_shares.py",),
    "relay/clients/channel.py": ("tests/relay/test_channel.py",),
    "relay/protocol/frames.py": ("tests/relay/test_frames.py",),
    "relay/clients/http11.py": ("tests/relay/test_http11.py",),
    "relay/protocol/http1.py": ("tests/relay/test_http1.py", "tests/relay/test_http11.py"),
    "relay/protocol/tensors.py": ("tests/relay/test_tensors.py",),
    "relay/transports/assembly.py": ("tests/relay/test_transport_assembly.py",),
    "runtime-python/thaw_runtime/engine/kv_memory.py": ("tests/thaw_runtime/test_kv_memory.py",),
    "runtime-python/thaw_runtime/llm/text_stream.py": ("tests/thaw_runtime/test_text.py",),
    "thaw/tracing/bound.py": (f"{SCHEDULER}/test_bound.py", f"{SCHEDULER}/test_bound_plans.py"),
    "thaw/partition.py": ("tests/thaw/test_partition.py",),
    "thaw/tracing/start_times.py": (f"{SCHEDULER}/test_bound.py",),
    "thaw/wire.py": ("tests/thaw/test_wire.py",),
}
"""Modules without a clock or a connection, and the tests of each module."""

REST: Final[dict[str, tuple[str, ...]]] = {
    "fetchd/pacing.py": ("tests/fetchd/test_pacing.py", "tests/fetchd/test_parts.py"),
    "fetchd/segments.py": ("tests/fetchd/test_parts.py", "tests/fetchd/test_isolation.py"),
    "gateway/auth.py": ("tests/gateway/test_auth.py", "tests/gateway/test_api.py"),
    "gateway/serving/routing/waiting_room.py": (
        "tests/gateway/test_queue_caps.py::test_the_room_tells_of_its_queues",
        "tests/gateway/test_routes.py",
        "tests/gateway/test_dispatch.py",
    ),
    "relay/state/pending.py": ("tests/relay/test_pending.py", "tests/gateway/test_async_runner.py"),
    "relay/state/bus.py": ("tests/relay/test_bus.py",),
    "relay/protocol/segment.py": ("tests/relay/test_segment.py",),
    "relay/transports/redis_out.py": ("tests/relay/test_transport_redis.py",),
    "relay/transports/redis_in.py": ("tests/relay/test_transport_redis.py",),
    "runtime-python/thaw_runtime/engine/link.py": (
        "tests/thaw_runtime/test_engine_link.py",
        "tests/thaw_runtime/test_runs.py",
    ),
    "runtime-python/thaw_runtime/llm/runs.py": ("tests/thaw_runtime/test_runs.py", "tests/thaw_runtime/test_proxy.py"),
    "gateway/scheduler/io/leading.py": (f"{SCHEDULER}/test_leading.py",),
    "invoker/containers/stem_cells.py": ("tests/invoker/test_cells.py",),
}
"""Modules with connections, threads or clocks.  Their tests take seconds, so fewer of their mutants are tried."""


# the mutants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mutant:
    """``source`` is the whole module with one fault, which begins at ``line``."""

    module: str
    line: int
    source: str
    diff: str


class _Finder(cst.CSTVisitor):
    """Every (node, its substitute, line) inside the functions of a module."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, faults: str) -> None:
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, int]] = []
        self._faults, self._depth = faults, 0
        self._raised: cst.CSTNode | None = None

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Decorator | cst.FormattedString | cst.Assert | cst.Parameters):
            return False
        if isinstance(node, cst.Call) and _does_nothing(node):
            return False
        if isinstance(node, cst.Raise):
            self._raised = node.exc
        if self._depth and node is not self._raised:  # the expression of a raised error counts as wording
            self._mutate(node)
        if isinstance(node, cst.FunctionDef):
            self._depth += 1
        return True

    def on_leave(self, node: cst.CSTNode) -> None:
        if isinstance(node, cst.FunctionDef):
            self._depth -= 1

    def _mutate(self, node: cst.CSTNode) -> None:
        if self._faults == "aftermath":
            self.found += [(old, new, self._line(old)) for old, new in aftermath.of(node)]
            return
        line = self._line(node)
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and operator.__name__ not in _WORDING:
                self.found += [(node, instead, line) for instead in operator(node)]

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)  # type: ignore[attr-defined]


def _does_nothing(call: cst.Call) -> bool:
    """True for ``log.event(…)``, which only operators read, and ``cast(…)``, which only type checkers use."""
    return (isinstance(call.func, cst.Attribute) and call.func.attr.value == "event") or _names(call.func, "cast")


def _names(node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Name) and node.value == name


def mutants_of(module: str, text: str, most: int, seed: int, faults: str = "usual") -> tuple[list[Mutant], int]:
    """Return ``most`` mutants of a module (0: all), and the number of mutations that it has.

    The same seed gives the same mutants, independent of the other modules.  Each mutant compiles, and differs."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    finder = _Finder(faults)
    wrapper.visit(finder)
    made: dict[str, Mutant] = {}
    before = ast.dump(ast.parse(text))
    for node, instead, line in random.Random(f"{seed}:{module}").sample(finder.found, len(finder.found)):  # noqa: S311
        source = wrapper.module.deep_replace(node, instead).code  # type: ignore[attr-defined]
        if _is_another(source, before):
            made.setdefault(source, Mutant(module, line, source, _diff(text, source)))
        if most and len(made) >= most:
            break
    return sorted(made.values(), key=lambda m: m.line), len(finder.found)


def _is_another(source: str, before: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != before
    except SyntaxError:
        return False


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


# the trees in which they are tested -----------------------------------------------------------------------------------


class Tree:
    """A copy of the working tree, without ignored files.  It tests one mutant at a time (mutant_server.py)."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        for name in names:
            if name and (ROOT / name).is_file():
                target = directory / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        (directory / "build").symlink_to(ROOT / "build")
        (directory / ".venv").symlink_to(ROOT / ".venv")
        path = f"{directory}:{directory / 'runtime-python'}"
        self._server = subprocess.Popen(
            [sys.executable, "scripts/mutant_server.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def test(self, tests: Sequence[str], timeout_s: float) -> str:
        """Return an empty text if all tests passed, else how the fault was noticed."""
        assert self._server.stdin is not None  # noqa: S101  both are pipes
        assert self._server.stdout is not None  # noqa: S101
        self._server.stdin.write(json.dumps([tests, timeout_s]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        # an example with which one mutant failed must not be used for the next mutant
        shutil.rmtree(self.path / ".hypothesis", ignore_errors=True)
        if not answer:
            sys.exit("the process that runs the tests has ended")
        return answer.strip()

    def write(self, module: str, source: str) -> None:
        """Write a module's source, and delete its compiled files.

        Python detects a changed source by its modification time in seconds and its size, and two mutants may have the
        same time and size.
        """
        path = self.path / module
        path.write_text(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def close(self) -> None:
        assert self._server.stdin is not None  # noqa: S101
        assert self._server.stdout is not None  # noqa: S101
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()


# the run --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Result:
    module: str
    n_mutants: int  # all mutations of the module
    n_tried: int = 0
    n_killed: int = 0
    survivors: list[Mutant] = field(default_factory=list)


class Run:
    def __init__(self, trees: Sequence[Tree], until_s: float) -> None:
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            self._trees.put(tree)
        self._until_s = until_s
        self._lock = threading.Lock()

    def baseline_s(self, module: str, tests: Sequence[str]) -> float:
        """The time of the module's tests without a fault.  Exits when they do not pass."""
        tree = self._trees.get()
        try:
            began_s = time.monotonic()
            noticed = tree.test(tests, 300.0)
            if noticed:
                sys.exit(f"{module}: its tests fail without any fault: {noticed}")
            return time.monotonic() - began_s
        finally:
            self._trees.put(tree)

    def try_one(self, mutant: Mutant, text: str, tests: Sequence[str], timeout_s: float, result: Result) -> None:
        """``text`` is the module without the fault."""
        if time.monotonic() >= self._until_s:
            return  # a mutant that was not tried is not counted
        tree = self._trees.get()
        try:
            tree.write(mutant.module, mutant.source)
            noticed = tree.test(tests, timeout_s)
        finally:
            tree.write(mutant.module, text)
            self._trees.put(tree)
        with self._lock:
            result.n_tried += 1
            result.n_killed += bool(noticed)
            if not noticed:
                result.survivors.append(mutant)

    def module(self, text: str, tests: Sequence[str], chosen: Sequence[Mutant], result: Result, jobs: int) -> None:
        timeout_s = 5 * self.baseline_s(result.module, tests) + _SLACK_S
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(self.try_one, m, text, tests, timeout_s, result) for m in chosen]:
                done.result()


def table(words: Sequence[str], which: str, faults: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    tables = ((aftermath.MODULES, True),) if faults == "aftermath" else ((PURE, True), (REST, False))
    for modules, is_pure in tables:
        if which in ("all", "pure" if is_pure else "rest"):
            for module, tests in modules.items():
                if not words or any(word in module for word in words):
                    yield module, tests, is_pure


def tell(result: Result) -> None:
    print(f"{result.module}: {result.n_killed} of {result.n_tried} noticed ({result.n_mutants} mutants)", flush=True)
    for mutant in sorted(result.survivors, key=lambda m: m.line):
        print(f"  survived at {mutant.module}:{mutant.line}")
        print("".join(f"    {line}\n" for line in mutant.diff.splitlines()), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults, and count those that the tests notice.")
    parser.add_argument("words", nargs="*", help="only modules whose path holds one of these")
    parser.add_argument("--modules", choices=("all", "pure", "rest"), default="all")
    parser.add_argument("--faults", choices=("usual", "aftermath"), default="usual")
    parser.add_argument("--most", type=int, default=20, help="mutants of a pure module; 0: all [20]")
    parser.add_argument("--most-rest", type=int, default=8, help="mutants of another module; 0: all [8]")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at once [2]")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further mutant after this [60]")
    parser.add_argument("--seed", type=int, default=SEED)
    asked = parser.parse_args()
    if not list(table(asked.words, asked.modules, asked.faults)):
        parser.error(f"no module's path holds one of: {' '.join(asked.words)}")
    print(f"seed {asked.seed}, {asked.most} and {asked.most_rest} mutants of a module at most", flush=True)
    began_s, results = time.monotonic(), list[Result]()
    with tempfile.TemporaryDirectory(prefix="thaw-mutants-") as directory:
        trees = [Tree(Path(directory) / str(i)) for i in range(asked.jobs)]
        run = Run(trees, began_s + 60 * asked.minutes)
        for module, tests, is_pure in table(asked.words, asked.modules, asked.faults):
            text = (trees[0].path / module).read_text()
            most = asked.most if is_pure else asked.most_rest
            chosen, n_mutants = mutants_of(module, text, most, asked.seed, asked.faults)
            results.append(Result(module, n_mutants))
            run.module(text, tests, chosen, results[-1], asked.jobs)
            tell(results[-1])
        for tree in trees:
            tree.close()
    n_tried, n_killed = sum(r.n_tried for r in results), sum(r.n_killed for r in results)
    print(
        json.dumps(
            {
                "seed": asked.seed,
                "modules": len(results),
                "mutants": sum(r.n_mutants for r in results),
                "tried": n_tried,
                "noticed": n_killed,
                "share": round(n_killed / max(1, n_tried), 3),
                "minutes": round((time.monotonic() - began_s) / 60, 1),
            }
        )
    )
    sys.exit(n_killed < WANTED * n_tried)


if __name__ == "__main__":
    main()
