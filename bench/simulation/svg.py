"""Line and bar charts as SVG, by hand: one file a chart, readable on white and on black, no dependency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_COLOURS = ("#888888", "#c58b2a", "#a0522d", "#6fa8dc", "#1f6fb4", "#0b3d91", "#2e9e5b", "#8e44ad")
_W, _H = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 200, 36, 46


def lines(title: str, x_name: str, y_name: str, xs: Sequence[float],
          series: Mapping[str, Sequence[float | None]]) -> str:  # fmt: skip
    """One line a series; a missing point is left out.  The y axis begins at 0."""
    top = _nice(max((v for values in series.values() for v in values if v is not None), default=1.0))
    low, high = min(xs), max(xs)

    def px(x: float) -> float:
        return _LEFT + (x - low) / ((high - low) or 1.0) * (_W - _LEFT - _RIGHT)

    body = [_text(px(x), _H - _BOTTOM + 18, f"{x:g}", "middle") for x in xs]
    for i, values in enumerate(series.values()):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [(px(x), _y(v, top)) for x, v in zip(xs, values, strict=True) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return _frame(title, x_name, y_name, top, list(series), body)


def bars(title: str, y_name: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> str:
    """For each group one bar a series."""
    top = _nice(max((v for values in series.values() for v in values if v is not None), default=1.0))
    width = (_W - _LEFT - _RIGHT) / max(1, len(groups))
    thin = 0.8 * width / max(1, len(series))
    body = []
    for g, group in enumerate(groups):
        body.append(_text(_LEFT + (g + 0.5) * width, _H - _BOTTOM + 18, group, "middle"))
        for i, values in enumerate(series.values()):
            value = values[g]
            if value is None:
                continue
            x, y = _LEFT + g * width + 0.1 * width + i * thin, _y(value, top)
            body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{thin * 0.9:.1f}" height="{_H - _BOTTOM - y:.1f}" '
                        f'fill="{_COLOURS[i % len(_COLOURS)]}"/>')  # fmt: skip
    return _frame(title, "", y_name, top, list(series), body)


def _frame(title: str, x_name: str, y_name: str, top: float, names: Sequence[str], body: Sequence[str]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_W}" height="{_H}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="#222222">{escape(title)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        y = _y(value, top)
        parts.append(f'<line x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    parts += body
    parts.append(_text((_LEFT + _W - _RIGHT) / 2, _H - 10, x_name, "middle"))
    parts.append(f'<text transform="translate(14 {_H / 2:.0f}) rotate(-90)" text-anchor="middle" fill="#222222">'
                 f"{escape(y_name)}</text>")  # fmt: skip
    for i, name in enumerate(names):
        y = _TOP + 8 + 20 * i
        parts.append(f'<rect x="{_W - _RIGHT + 14}" y="{y}" width="12" height="12" '
                     f'fill="{_COLOURS[i % len(_COLOURS)]}"/>')  # fmt: skip
        parts.append(_text(_W - _RIGHT + 32, y + 10, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222">{escape(text)}</text>'


def _y(value: float, top: float) -> float:
    return _H - _BOTTOM - value / top * (_H - _TOP - _BOTTOM)


def _nice(largest: float) -> float:
    """A round number that is not less."""
    unit = 1.0
    while unit * 10 < largest:
        unit *= 10
    while unit > largest:
        unit /= 10
    return next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= largest * 0.999)
