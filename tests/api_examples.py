"""The examples of docs/api.md: what each one calls, and how a user's shell runs it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
_HEAD = re.compile(r"\A# (\d{3}): (.+)\Z")
_ID = "x-openwhisk-activation-id"


@dataclass(frozen=True)
class Example:
    status: int
    what: str
    command: str

    @property
    def method(self) -> str:
        words = shlex.split(self.command)
        named = [word for flag, word in pairwise(words) if flag == "-X"]
        return named[0] if named else "POST" if "--json" in words else "GET"

    @property
    def path(self) -> str:
        (url,) = (word for word in shlex.split(self.command) if word.startswith("$API/"))
        return url.removeprefix("$API").partition("?")[0]

    def calls(self, method: str, template: str) -> bool:
        """Return whether it is an example of this operation.  A literal path takes precedence over one with a
        placeholder."""
        wanted = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template))
        is_other = self.path.endswith("/packages/refresh") and "{" in template.rpartition("/")[2]
        return self.method == method.upper() and re.fullmatch(wanted, self.path) is not None and not is_other


def examples() -> list[Example]:
    """Return the examples in the page's order, which follows a user's day."""
    section = PAGE.read_text().split("## Every call, once\n")[1]
    found = []
    for block in _BLOCK.findall(section):
        for text in block.strip().split("\n\n"):
            head, _, command = text.partition("\n")
            match = _HEAD.match(head)
            assert match is not None, f"begin with '# STATUS: what it does': {text}"
            found.append(Example(int(match[1]), match[2], command))
    return found


class Shell:
    """Runs examples one after another in bash, with the variables that the page names."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self._head, self.body = directory / "head", directory / "body"
        options = ("silent", "max-time = 300", f'dump-header = "{self._head}"', f'output = "{self.body}"')
        (directory / ".curlrc").write_text("\n".join(options))
        self._variables = {**variables, "CURL_HOME": str(directory), "HOME": str(directory)}

    def status(self, example: Example, environ: Mapping[str, str]) -> int:
        """Remember the ids in the answer for the examples after it."""
        self.body.write_bytes(b"")
        env = {**environ, **self._variables}
        subprocess.run(["bash", "-euc", example.command], env=env, check=True, timeout=310)
        lines = self._head.read_text().splitlines()
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == _ID:
                self._variables["ID"] = value.strip()
        if example.method == "POST" and example.path.endswith("/keys"):
            self._variables["KEY_ID"] = json.loads(self.body.read_text())["id"]
        return int([line for line in lines if line.startswith("HTTP/")][-1].split()[1])
