"""Settings are read once, and an invalid one is rejected by its variable name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from thaw import settings
from thaw.settings import SettingError, setting


@dataclass(frozen=True)
class Example:
    url: str = setting("EXAMPLE_URL", "where the server is")
    pool_mb: int = setting("EXAMPLE_POOL_MB", "size", 64)
    on: bool = setting("EXAMPLE_ON", "whether", False)
    rate: float | None = setting("EXAMPLE_RATE", "bytes a second", None)


def test_values_are_read_by_type_and_defaults_fill_the_rest() -> None:
    loaded = settings.load(Example, {"EXAMPLE_URL": "redis://x", "EXAMPLE_ON": "true", "EXAMPLE_RATE": "2.5"})
    assert loaded == Example(url="redis://x", pool_mb=64, on=True, rate=2.5)


def test_an_empty_optional_is_none() -> None:
    assert settings.load(Example, {"EXAMPLE_URL": "x", "EXAMPLE_RATE": ""}).rate is None


def test_a_missing_variable_is_named_with_what_it_means() -> None:
    with pytest.raises(SettingError, match="EXAMPLE_URL is not set") as caught:
        settings.load(Example, {})
    assert caught.value.hint == "set it: where the server is"


@pytest.mark.parametrize(
    ("variable", "text"), [("EXAMPLE_POOL_MB", "many"), ("EXAMPLE_ON", "maybe"), ("EXAMPLE_RATE", "x")]
)
def test_a_bad_value_is_rejected_by_variable_name(variable: str, text: str) -> None:
    with pytest.raises(SettingError, match=f"{variable}='{text}' is not a"):
        settings.load(Example, {"EXAMPLE_URL": "x", variable: text})
