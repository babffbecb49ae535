"""Makes text from untrusted files safe to quote in an error message."""

from __future__ import annotations


def shown(text: str, most: int = 200) -> str:
    """Return at most so many characters of the text's beginning, with a question mark for each unprintable one."""
    cut = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)
