"""Words of a stranger's file, made fit for an error's sentence."""

from __future__ import annotations


def shown(text: str, most: int = 200) -> str:
    """The beginning of the text, at most so many characters; a question mark for each that cannot be printed."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)
