"""Rules on whether a model can run that need nothing but the names of its files: the command line and hosts share
them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from thaw.errors import ModelUnsupported

TOKENIZER_NAME: Final = "tokenizer.json"
SLOW_TOKENIZER_NAMES: Final = ("tokenizer.model", "vocab.json", "merges.txt")


def check_files(names: Collection[str], what: str) -> None:
    """``what`` names the model in the error.  Raises ModelUnsupported."""
    if TOKENIZER_NAME not in names:
        raise no_tokenizer(what, has_slow_one=any(name in names for name in SLOW_TOKENIZER_NAMES))


def no_tokenizer(what: str, *, has_slow_one: bool = False) -> ModelUnsupported:
    only = ", only the files of a slow tokenizer" if has_slow_one else ""
    return ModelUnsupported(
        f"{what} has no {TOKENIZER_NAME}{only}",
        hint=f"a push makes {TOKENIZER_NAME} of the slow tokenizer's files: thaw model push DIR URI"
        if has_slow_one
        else "save the tokenizer beside the model: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)",
    )
