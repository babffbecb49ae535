"""Promises of the repository as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.reference_pages import DOCS, PAGES

ROOT = Path(__file__).parents[1]


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize(("name", "write"), PAGES.items())
def test_a_reference_page_says_what_the_code_says(name: str, write: Callable[[], str]) -> None:
    assert (DOCS / name).read_text() == write(), "renew it: python -m tests.reference_pages"


def test_every_metric_name_has_component_and_unit_or_noun() -> None:
    names = re.findall(r"^\| `(\w+)`", (DOCS / "metrics.md").read_text(), re.M)
    assert names
    assert all(re.fullmatch(r"thaw_(gateway|invoker|fetchd|scheduler)(_[a-z]+)+", name) for name in names), names


def test_every_link_in_the_pages_leads_somewhere() -> None:
    broken = []
    for page in [p for p in tracked() if p.suffix == ".md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not target.startswith("http") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} → {target}")
    assert broken == []


FILES_OF_OTHERS = {
    "__main__.py",  # a file in a function's zip
    "FILE.py",  # a placeholder in the help of the command line
    "setup.py",  # a file of packages, which nothing here runs
    "version.py",  # a file of PyTorch
    "hello_app.py",  # bench/one_gateway.py writes it
}


def test_every_file_that_code_or_a_page_names_is_there() -> None:
    """Tests also name files that they write themselves, so in tests only the names of pages are checked."""
    paths = [f"/{p.relative_to(ROOT)}" for p in tracked()]
    missing = []
    for path in tracked():
        relative = path.relative_to(ROOT)
        if path.suffix not in {".py", ".md", ".toml", ".sh", ".h", ".cpp", ".yml", ".in"}:
            continue
        endings = "md" if relative.parts[0] == "tests" else "md|py"
        for name in re.findall(rf"(?<![\w/.:}}-])[\w./-]*[\w-]+\.(?:{endings})\b", path.read_text()):
            wanted = re.sub(r"^(\.{1,2}/)+", "", name)
            if wanted not in FILES_OF_OTHERS and not any(known.endswith(f"/{wanted}") for known in paths):
                missing.append(f"{relative}: {name}")
    assert missing == []


def test_every_direct_dependency_has_its_line() -> None:
    listed = (DOCS / "dependencies.md").read_text().lower()
    for name in ("cpu.in", "dev.in", "bench.in", "clients.in"):
        for line in (ROOT / "deps" / name).read_text().splitlines():
            if line and not line.startswith(("#", "-")):
                package = re.split(r"[=<>;\s]", line)[0].removeprefix("types-")
                assert package in listed, package


@pytest.mark.parametrize("lock", ["cpu.lock", "gpu.lock"])
def test_what_runs_needs_nothing_that_its_lock_lacks(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {n for group in [project["dependencies"], *project["optional-dependencies"].values()] for n in group}
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "deps" / lock).read_text(), re.M))
    assert {n for n in needed if not n.startswith("thaw[")} - locked == set()


@pytest.mark.parametrize(("lock", "build", "cuda"), [("cpu.lock", "+cpu", False), ("gpu.lock", "", True)])
def test_a_lock_has_the_torch_of_its_device(lock: str, build: str, cuda: bool) -> None:
    """A folder of wheels on the machine that resolved the locks must not bring its CPU build into the GPU's lock."""
    text = (ROOT / "deps" / lock).read_text()
    assert re.findall(r"^torch==[0-9.]+(\+\w+)?", text, re.M) == [build]
    assert ("\nnvidia-cublas==" in text) == cuda


@pytest.mark.parametrize("component", ["gateway", "invoker", "fetchd"])
def test_an_extra_brings_what_its_component_imports(component: str) -> None:
    """A host of a fleet is installed with `pip install thaw[invoker,fetchd]`, without a lock."""
    own = {"thaw", "relay", component}
    files = [p for part in own for p in (ROOT / part).rglob("*.py")]
    unused = {ROOT / "thaw/cli", ROOT / "thaw/dev"}
    if component != "fetchd":
        unused |= {ROOT / "thaw/s3.py", ROOT / "thaw/kserve", ROOT / "thaw/checkpoints/leaf_digest.py"}
    unused |= {ROOT / "thaw/kubernetes"} if component != "invoker" else set()
    imported = {name for path in files if not unused & {path, *path.parents} for name in imports(path)}
    third_party = {name.replace("_", "-") for name in imported - own - sys.stdlib_module_names}
    assert third_party - extra(component) == set()


def imports(path: Path) -> set[str]:
    """The packages that a file imports, at any place in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def extra(name: str) -> set[str]:
    """The packages of an extra, including those of the extras that it names and those of every installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(project["dependencies"]) | set(project["optional-dependencies"][name])
    nested = {match[1] for n in names if (match := re.fullmatch(r"thaw\[([\w,]+)\]", n))}
    return names.union(*(extra(one) for group in nested for one in group.split(",")))


def test_no_file_grew_past_one_idea() -> None:
    sizes = {p.relative_to(ROOT): len(p.read_text().splitlines()) for p in tracked() if p.suffix == ".py"}
    assert {str(p): n for p, n in sizes.items() if n > 450 and p.parts[0] != "tests"} == {}


def test_one_folder_knows_vllm() -> None:
    """Outside it, only the registry of engines names vLLM, except in comments and docstrings."""
    runtime = ROOT / "runtime-python" / "thaw_runtime"
    naming = {str(p.relative_to(runtime)) for p in runtime.rglob("*.py") if "vllm" in code(p).lower()}
    assert {name for name in naming if not name.startswith("engine/vllm/")} == {"engine/registry.py"}


def code(path: Path) -> str:
    """A file without its comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not is_text(s)]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def is_text(statement: ast.stmt) -> bool:
    """A docstring, or the text below a constant."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports",)], ids=" ".join
)
def test_lint_types_and_layers_are_clean(command: tuple[str, ...]) -> None:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
