"""The error tree: every class has one HTTP status and survives a trip through ErrorInfo."""

from __future__ import annotations

import pytest

from thaw import errors
from thaw.errors import ErrorInfo, ThawError


def every_class(cls: type[ThawError] = ThawError) -> list[type[ThawError]]:
    return [cls] + [found for child in cls.__subclasses__() for found in every_class(child)]


@pytest.mark.parametrize("cls", [c for c in every_class() if c.__module__ == "thaw.errors"], ids=lambda c: c.__name__)
def test_every_error_survives_a_process_boundary_with_class_text_and_hint(cls: type[ThawError]) -> None:
    back = errors.from_info(ErrorInfo(cls.__name__, "what happened", "what to do"))
    assert type(back) is cls
    assert (str(back), back.hint, back.http_status) == ("what happened", "what to do", cls.http_status)
    assert back.info() == ErrorInfo(cls.__name__, "what happened", "what to do")


def test_the_drawn_tree_names_every_class_with_its_status() -> None:
    drawing = errors.__doc__ or ""
    for cls in every_class():
        if cls.__module__ != "thaw.errors":
            continue
        line = next((row for row in drawing.splitlines() if f" {cls.__name__} " in f" {row} "), "")
        assert line, f"the drawing lacks {cls.__name__}"
        if cls not in (ThawError, errors.RequestError):
            assert str(cls.http_status) in line or cls is errors.StaleEpoch, line


def test_an_error_of_a_newer_peer_becomes_a_platform_error_with_its_text() -> None:
    back = errors.from_info(ErrorInfo("InventedLater", "text", "hint"))
    assert type(back) is errors.PlatformError
    assert str(back) == "text"
