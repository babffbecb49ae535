"""The report's charts: drawn from the recorded runs, the same each time, and nothing of them is cut off."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from bench.simulation import charts, record
from bench.simulation.specs import SYSTEMS

DIRECTORY = Path(__file__).parents[2] / "docs" / "simulation"
DRAWN = sorted(DIRECTORY.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("charts")
    charts.write(directory, record.read(DIRECTORY).runs)
    return directory


def shape(text: str) -> str:
    """Return the text without numbers, and without ids, which are made of numbers."""
    return _NUMBER.sub("0", re.sub(r'(id="|#)\w+', r"\1", text))


def numbers(text: str) -> list[float]:
    return [float(n) for n in _NUMBER.findall(re.sub(r'(id="|#)\w+', r"\1", text))]


def test_every_chart_of_the_report_is_drawn_from_the_record(again: Path) -> None:
    assert sorted(p.name for p in again.iterdir()) == [p.name for p in DRAWN]


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_chart_shows_what_was_recorded(path: Path, again: Path) -> None:
    """Positions agree to a tenth of a pixel, because another processor may round differently.  After a change, run
    bench/simulate.py --page."""
    made = (again / path.name).read_text()
    assert shape(made) == shape(path.read_text())
    assert numbers(made) == pytest.approx(numbers(path.read_text()), abs=0.1)


def test_equal_runs_give_equal_files(again: Path, tmp_path: Path) -> None:
    charts.write(tmp_path, record.read(DIRECTORY).runs)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in again.iterdir()}


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_no_text_of_a_chart_leaves_it(path: Path) -> None:
    root = ET.fromstring(path.read_text())
    width = float(root.attrib["viewBox"].split()[2])
    texts = [t for t in root.iter(f"{SVG}text") if t.text]
    assert {spec.label for spec in SYSTEMS.values()} <= {t.text for t in texts}
    for text in texts:
        if "rotate(-90" not in (text.get("transform") or ""):
            assert right_end(text) <= width, text.text


def right_end(text: ET.Element) -> float:
    """Return the position where a text ends, in DejaVu Sans, which is one of the widest common fonts."""
    style = text.get("style") or ""
    size = float(re.findall(r"([\d.]+)px", style)[0])
    width = TextPath((0, 0), text.text or "", size=size, prop=FontProperties(family="DejaVu Sans")).get_extents().width
    anchor = re.findall(r"text-anchor: (\w+)", style)[0]
    return float(text.get("x") or 0) + width * {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
