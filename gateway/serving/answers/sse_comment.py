"""The comment of a stream that tells a waiting client the phase of its cold start."""

from __future__ import annotations


def sse_comment(sentence: str, *, has_id: bool = False) -> str:
    """Return the comment as text of the stream.

    ``has_id``: an event of the stream had an id.  OpenAI's SDK takes any empty line after the first id for the end of
    an event, so no empty line follows the comment then.
    """
    return f": thaw {sentence}\n" if has_id else f": thaw {sentence}\n\n"
