"""The pages for a newcomer: what docs/architecture.md names exists, and the README's drawing is readable."""

from __future__ import annotations

import ast
import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

ROOT = Path(__file__).parents[1]
SCHEDULER = ROOT / "gateway" / "scheduler"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PLACE = re.compile(r"`([\w/-]+(?:/[\w-]+)*\.py): ([\w.]+)(?:\(\))?`")
"""Matches `gateway/api/openwhisk/invoke.py: invoke()`, `fetchd/segments.py: SegmentStore.create()`, `gateway/core.py: Gateway`.
"""


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"## {title}\n")[1], maxsplit=1, flags=re.M)[0]


WALK = section("A cold request, from HTTP to the first token")
INDEX = [row for row in section("Where is …?").splitlines() if row.startswith("| Where")]


def source(path: str) -> Path:
    """The path of a file.  The package of the runtime is in a folder of its own."""
    return ROOT / "runtime-python" / path if path.startswith("thaw_runtime/") else ROOT / path


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Functions and classes at the top of a file, and the methods of its classes."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return frozenset(found)


@pytest.mark.parametrize(("path", "name"), sorted(set(PLACE.findall(PAGE))), ids=lambda part: part)
def test_a_place_that_the_architecture_page_names_exists(path: str, name: str) -> None:
    assert source(path).is_file(), f"{path} has moved: docs/architecture.md names it"
    assert name in names_in(source(path)), f"{path} has no {name}: docs/architecture.md names it"


def test_every_file_that_the_page_names_says_where_in_it_to_look() -> None:
    bare = re.findall(r"`((?:gateway|invoker|fetchd|thaw_runtime)/[\w/]+\.py)`", PAGE)
    assert bare == []


def test_each_step_of_the_walk_names_its_function() -> None:
    steps = re.split(r"^\d+\. ", WALK, flags=re.M)[1:]
    assert len(steps) > 20
    assert [step[:80] for step in steps if not PLACE.search(step)] == []


def test_the_walk_is_read_in_one_go() -> None:
    assert len(WALK.splitlines()) <= 120


def test_each_question_of_a_newcomer_is_answered_by_one_or_two_places() -> None:
    answers = [PLACE.findall(row) for row in INDEX]
    assert len(answers) >= 10
    assert [row for row, places in zip(INDEX, answers, strict=True) if not 1 <= len(places) <= 2] == []


def test_the_scheduling_page_names_each_file_of_the_scheduler_in_its_room() -> None:
    rooms = {path.parent.name for path in SCHEDULER.glob("*/__init__.py")}
    page = (ROOT / "docs" / "scheduling.md").read_text()
    named, room = dict[str, set[str]](), ""
    for row in re.findall(r"^\| (`\w+/`)? ?\| (`.+?) \|", page, re.M):
        room = row[0].strip("`/") or room
        named.setdefault(room, set()).update(re.findall(r"`(\w+\.py)`", row[1]))
    assert named == {room: {p.name for p in (SCHEDULER / room).glob("[!_]*.py")} for room in rooms}
    (beside,) = re.findall(r"^Beside the rooms: (.+?)\n\n", page, re.M | re.S)
    assert set(re.findall(r"`(\w+\.py)`", beside)) == {p.name for p in SCHEDULER.glob("[!_]*.py")}


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, inner: Box) -> bool:
        return (
            self.left <= inner.left
            and self.top <= inner.top
            and inner.right <= self.right
            and inner.bottom <= self.bottom
        )


SVG = "{http://www.w3.org/2000/svg}"
DRAWING = ET.parse(ROOT / "docs" / "platform.svg").getroot()


def boxes() -> list[Box]:
    """The rectangles, without the page that they are drawn on."""
    found = []
    for rect in DRAWING.iter(f"{SVG}rect"):
        left, top = float(rect.get("x") or 0), float(rect.get("y") or 0)
        found.append(Box(left, top, left + float(rect.attrib["width"]), top + float(rect.attrib["height"])))
    return found[1:]


@functools.cache
def texts() -> list[tuple[str, Box]]:
    """Each text and its box in DejaVu Sans, which is wider than the fonts that the drawing asks for."""
    found = []
    for group in DRAWING.iter(f"{SVG}g"):
        for text in group.findall(f"{SVG}text"):
            size = float(group.get("font-size") or 13)
            font = FontProperties(family="DejaVu Sans", weight=group.get("font-weight") or "normal")
            width = TextPath((0, 0), text.text or "", size=size, prop=font).get_extents().width
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            left = x - width / 2 if (text.get("text-anchor") or group.get("text-anchor")) == "middle" else x
            found.append((text.text or "", Box(left, y - size * 0.8, left + width, y)))
    return found


def box_of(label: str) -> Box:
    """The smallest box around the first text that equals ``label``."""
    room = next(room for text, room in texts() if text == label)
    return min((b for b in boxes() if b.holds(room)), key=lambda b: (b.right - b.left) * (b.bottom - b.top))


def test_every_text_of_the_drawing_is_inside_its_box_or_outside_of_all() -> None:
    for text, room in texts():
        touched = [
            b
            for b in boxes()
            if b.left < room.right and room.left < b.right and b.top < room.bottom and room.top < b.bottom
        ]
        assert all(b.holds(room) for b in touched), text


def test_the_drawing_shows_hosts_with_their_parts_and_everything_else_outside() -> None:
    hosts = [box_of("GPU host 1"), box_of("GPU host 2, 3, …")]
    names = [text for text, _ in texts()]
    assert [names.count(part) for part in ("invoker", "container", "fetchd")] == [2, 2, 2]
    assert all(hosts[0].holds(box_of(part)) for part in ("invoker", "container", "fetchd"))
    for outside in ("clients", "gateway", "state server", "scheduler", "relay server", "model store"):
        assert not any(host.holds(box_of(outside)) for host in hosts), outside
