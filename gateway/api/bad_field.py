"""The error of an OpenAI body."""

from __future__ import annotations

from thaw.errors import BadRequest


class BadField(BadRequest):
    """An OpenAI body is wrong at ``param``; None: as a whole."""

    def __init__(self, param: str | None, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.openai_code = param, code
