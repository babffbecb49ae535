"""The packages of docs/extending.md, read from the page, and installed in a directory that a test chooses."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"


@dataclass(frozen=True, slots=True)
class Package:
    """``entry_points`` maps a group to its names and their places."""

    code: str
    entry_points: dict[str, dict[str, str]]

    @property
    def module(self) -> str:
        (place,) = (place for group in self.entry_points.values() for place in group.values())
        return place.partition(":")[0]

    @property
    def n_lines(self) -> int:
        return sum(1 for line in self.code.splitlines() if line.strip())

    def install(self, directory: Path) -> None:
        """Write the same files as pip: the module, and a description that lists the entry points."""
        (directory / f"{self.module}.py").write_text(self.code)
        described = directory / f"{self.module}-1.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.module}\nVersion: 1\n")
        lines = []
        for group, points in self.entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items())]
        (described / "entry_points.txt").write_text("\n".join(lines) + "\n")


def on_page() -> dict[str, Package]:
    """The packages on the page, by the title of the section that shows each one."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
        (project,) = re.findall(r"^```toml\n(.*?)^```$", section, re.M | re.S)
        found[section.partition("\n")[0]] = Package(code, tomllib.loads(project)["project"]["entry-points"])
    return found
