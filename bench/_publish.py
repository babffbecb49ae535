"""Run the benchmarks and publish their results.

    python -m bench._publish [PROGRAM…]           run what claims.toml lists for these programs (all), write the page
    python -m bench._publish --quick [PROGRAM…]   run each program with --quick; only --record writes the page
    python -m bench._publish --from LOG…          publish the last lines of kept outputs, then write the page
    python -m bench._publish --page               only write the page, from the published results

When a run fails, the others go on, and the failed run is named at the end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from bench import _page
from bench._common import PYTHON, ROOT, python_env, say
from bench._results import record

_QUICK_S: Final = 120.0


def main() -> int:
    options = _arguments()
    if options.page or options.logs:
        for log in options.logs:
            record(claimed(last_line(log.read_text())))
        _page.write()
        return 0
    runs = _page.read_claims().runs
    if unknown := set(options.programs) - runs.keys():
        raise SystemExit(f"unknown program(s) {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
    wanted = [name for name in runs if not options.programs or name in options.programs]
    failed = _quick(wanted, keep=options.record) if options.quick else _all(wanted, runs)
    for command in failed:
        say(f"failed: {command}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="as claims.toml names it")
    parser.add_argument("--quick", action="store_true", help="a small run of each, under two minutes")
    parser.add_argument("--record", action="store_true", help="publish what --quick finds")
    parser.add_argument("--from", dest="logs", type=Path, nargs="+", default=[], metavar="LOG", help="kept outputs")
    parser.add_argument("--page", action="store_true", help="only write the page")
    return parser.parse_args()


def _all(wanted: Iterable[str], runs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Run all commands.  The page is written after each run, so an interruption loses no finished run."""
    failed = []
    for command in (command for name in wanted for command in runs[name]):
        if (line := run(command)) is None:
            failed.append(command)
            continue
        record(claimed(line))
        _page.write()
    return failed


def _quick(wanted: Iterable[str], *, keep: bool) -> list[str]:
    failed = []
    for program in dict.fromkeys(f"bench/{name}.py" for name in wanted if (ROOT / "bench" / f"{name}.py").exists()):
        began = time.monotonic()
        line = run(f"{program} --quick")
        took = time.monotonic() - began
        say(f"{program} --quick took {took:.0f} s" + (", longer than two minutes" if took > _QUICK_S else ""))
        if line is None:
            failed.append(program)
        elif keep:
            record(claimed(line))
    if keep:
        _page.write()
    return failed


def run(command: str) -> Mapping[str, Any] | None:
    """Run a command, print its output, and return its last line, or None if the command failed."""
    say(f"== {command}")
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    argv = [*words[:at], PYTHON, *words[at:]]
    lines = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=python_env()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip("\n"))
            lines.append(line)
    return last_line("".join(lines)) if process.returncode == 0 else None


def claimed(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Remove the figures that claims.toml does not explain.

    The other figures, which may have taken hours, are still published.
    """
    known = {(c.bench, c.name) for c in _page.read_claims().claims}
    left_out = [g["name"] for g in line["goals"] if (line["bench"], g["name"]) not in known]
    if left_out:
        say(f"not published, because bench/claims.toml says nothing about it: {', '.join(left_out)}")
    return {**line, "goals": [g for g in line["goals"] if g["name"] not in left_out]}


def last_line(text: str) -> Mapping[str, Any]:
    line: Mapping[str, Any] = json.loads(text.rstrip("\n").splitlines()[-1])
    return line


if __name__ == "__main__":
    sys.exit(main())
