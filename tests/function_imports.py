"""A function that reports which modules it can import.  It gives the same answer with every driver
(docs/functions.md)."""

from __future__ import annotations

from typing import Any

PROBE = """
import sys
LOADED = sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__", "main__"})
import importlib, importlib.util, os, pkgutil

def is_there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

def main(args):
    library = os.path.dirname(os.__file__)
    of_library = (library, os.path.join(library, "lib-dynload"))
    for name in args["library"]:
        importlib.import_module(name)
    return {
        "elsewhere": sorted(m.name for m in pkgutil.iter_modules() if m.module_finder.path not in of_library),
        "loaded": LOADED,
        "there": [name for name in args["absent"] if is_there(name)],
        "pythonpath": os.environ.get("PYTHONPATH"),
    }
"""
ARGUMENTS = {
    "library": ["asyncio", "json", "multiprocessing", "sqlite3", "ssl", "urllib.request", "zoneinfo"],
    "absent": [
        "flask",
        "numpy",
        "pip",
        "redis",
        "relay",
        "requests",
        "setuptools",
        "thaw",
        "thaw_runtime",
        "thaw_runtime.action.child",
        "torch",
        "vllm",
    ],
}


def check(answer: dict[str, Any]) -> None:
    """Check that the function may import the standard library and nothing else."""
    assert answer == {"elsewhere": [], "loaded": [], "there": [], "pythonpath": None}
