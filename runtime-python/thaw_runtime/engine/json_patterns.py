"""Regular expressions over the text of a JSON string, as xgrammar compiles them.

JSON Schema's ``pattern`` speaks of a string's value and is found anywhere in it.  xgrammar's speaks of the characters
between the quotes, all of them: ``[^x]`` would write a quote or a line's end there, and no answer would be JSON.  So a
pattern is read here and written anew: each set of characters as those that JSON may have raw, beside the escapes of the
others, and what an anchor leaves open as any characters.  Where ECMA 262 and Python read a pattern in two ways
(``\\d``, ``\\w``, ``\\s``, ``.``), the characters are those of both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final

_Ranges = list[tuple[int, int]]
"""Code points, with both ends of each range; sorted and apart."""

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_ESCAPES: Final = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
"""The characters that JSON writes only with a backslash, and the letter behind it."""
_RAW: Final[_Ranges] = [(0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST)]
_ASCII: Final[_Ranges] = [(0, 0x7F)]
_SPACES: Final[_Ranges] = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
]
_SPACES_OF_ONE: Final[_Ranges] = [(0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]
"""White space to Python or to ECMA 262 alone."""
_LINE_ENDS: Final[_Ranges] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_DIGITS: Final[_Ranges] = [(0x30, 0x39)]
_WORDS: Final[_Ranges] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_MOST: Final = 4096
"""Characters of a pattern."""


class Unwritable(Exception):
    """The pattern has something that cannot be written for xgrammar."""


def in_json(pattern: str) -> str:
    """The texts of JSON strings in whose value ``pattern`` is found.  Raises Unwritable.

    Each repetition has its bounds in braces: xgrammar reads ``(ab{1,2})?`` as if the ``a`` might be missing.
    """
    if len(pattern) > _MOST or "{," in pattern:
        raise Unwritable("it is too long" if len(pattern) > _MOST else "{, has two meanings")
    try:
        parsed = _parser.parse(re.sub(r"\(\?<(?![=!])", "(?P<", pattern))
    except (re.error, RecursionError, OverflowError) as e:
        raise Unwritable(str(e)) from None
    if parsed.state.flags & ~re.UNICODE:
        raise Unwritable("it has flags")
    return _sequence(list(parsed), begins=True, ends=True)


# ── sets of characters ───────────────────────────────────────────────────────────────────────────────────────────────


def _sorted(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    found: _Ranges = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _without(ranges: _Ranges) -> _Ranges:
    """All other code points."""
    found, at = [], 0
    for first, last in ranges:
        if at < first:
            found.append((at, first - 1))
        at = last + 1
    return [*found, (at, _LAST)] if at <= _LAST else found


def _both(one: _Ranges, other: _Ranges) -> _Ranges:
    return _without(_sorted((*_without(one), *_without(other))))


_CATEGORIES: Final = {
    sre.CATEGORY_DIGIT: (_DIGITS, _DIGITS),
    sre.CATEGORY_WORD: (_WORDS, _WORDS),
    sre.CATEGORY_SPACE: (_SPACES, _sorted((*_SPACES, *_SPACES_OF_ONE))),
    sre.CATEGORY_NOT_DIGIT: (_both(_without(_DIGITS), _ASCII), _without(_DIGITS)),
    sre.CATEGORY_NOT_WORD: (_both(_without(_WORDS), _ASCII), _without(_WORDS)),
    sre.CATEGORY_NOT_SPACE: (_without(_sorted((*_SPACES, *_SPACES_OF_ONE))), _without(_SPACES)),
}
"""The characters that every reader takes for one of the category, and those that any reader does."""
_BY_ALPHABET: Final = (sre.CATEGORY_DIGIT, sre.CATEGORY_WORD)
"""Python knows more digits and letters than ASCII's."""


def _set(items: Sequence[tuple[Any, Any]]) -> _Ranges:
    is_negated = bool(items) and items[0][0] is sre.NEGATE
    found, limits = list[tuple[int, int]](), [(0, _LAST)]
    for op, value in items:
        if op is sre.LITERAL:
            found.append((value, value))
        elif op is sre.RANGE:
            found.append(value)
        elif op is sre.CATEGORY and value in _CATEGORIES:
            found += _CATEGORIES[value][is_negated]
            if is_negated and value in _BY_ALPHABET:
                limits = _ASCII
        elif op is not sre.NEGATE:
            raise Unwritable(f"{op} in a set")
    return _both(_without(_sorted(found)), limits) if is_negated else _sorted(found)


def _written(ranges: _Ranges) -> str:
    """One character of the set, as JSON has it."""
    raw = "".join(_range(first, last) for first, last in _both(ranges, _RAW))
    escaped = "".join(letter for at, letter in _ESCAPES.items() if any(a <= at <= b for a, b in ranges))
    choices = [f"[{raw}]"] if raw else []
    if escaped:
        choices.append("\\\\[" + escaped.replace("\\", "\\\\") + "]")
    if not choices:
        raise Unwritable("it wants a character that JSON has no short escape for")
    return choices[0] if len(choices) == 1 else f"({'|'.join(choices)})"


def _range(first: int, last: int) -> str:
    return _in_set(first) if first == last else f"{_in_set(first)}-{_in_set(last)}"


def _in_set(at: int) -> str:
    if at in (0x5D, 0x5E, 0x2D, 0x5B):
        return f"\\{chr(at)}"
    return chr(at) if 0x20 < at < 0x7F else f"\\u{{{at:x}}}"


_ANY: Final = _written([(0, _LAST)])


# ── sequences ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sequence(items: list[tuple[Any, Any]], *, begins: bool, ends: bool) -> str:
    """``begins``: nothing stands before it, so characters may, unless an anchor says otherwise; so ``ends``."""
    before = after = ""
    if begins:
        while items and items[0] == (sre.AT, sre.AT_BEGINNING):
            items, begins = items[1:], False
    if ends:
        while items and items[-1] == (sre.AT, sre.AT_END):
            items, ends = items[:-1], False
    if begins and not (items and _has_ends(items[0])):
        before, begins = f"{_ANY}*", False
    if ends and not (items and _has_ends(items[-1])):
        after, ends = f"{_ANY}*", False
    last = len(items) - 1
    parts = [_part(op, value, begins=begins and n == 0, ends=ends and n == last) for n, (op, value) in enumerate(items)]
    return f"{before}{''.join(parts)}{after}"


def _has_ends(item: tuple[Any, Any]) -> bool:
    return item[0] in (sre.BRANCH, sre.SUBPATTERN)


def _part(op: Any, value: Any, *, begins: bool, ends: bool) -> str:
    if op is sre.LITERAL:
        return _written([(value, value)])
    if op is sre.NOT_LITERAL:
        return _written(_without([(value, value)]))
    if op is sre.ANY:
        return _written(_without(_LINE_ENDS))
    if op is sre.IN:
        return _written(_set(value))
    if op is sre.BRANCH:
        return f"({'|'.join(_sequence(list(one), begins=begins, ends=ends) for one in value[1])})"
    if op is sre.SUBPATTERN and not value[1] and not value[2]:  # no flags
        return f"({_sequence(list(value[3]), begins=begins, ends=ends)})"
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, repeated = value
        bounds = f"{{{least},{'' if most is sre.MAXREPEAT else most}}}"
        return f"({_sequence(list(repeated), begins=False, ends=False)}){bounds}"
    raise Unwritable("an anchor in its middle" if op is sre.AT else f"{str(op).lower().replace('_', ' ')}")


_DATE: Final = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME: Final = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+\\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
FORMATS: Final = {
    name: in_json(f"^{pattern}$")
    for name, pattern in (
        ("date", _DATE),
        ("time", _TIME),
        ("date-time", f"{_DATE}T{_TIME}"),
        ("ipv4", f"{_OCTET}(\\.{_OCTET}){{3}}"),
    )
}
"""Formats by the pattern of their texts (RFC 3339, RFC 2673).  xgrammar's own have days that no month has, and octets
with a zero in front."""
