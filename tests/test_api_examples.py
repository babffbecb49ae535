"""docs/api.md has an example of every operation; tests/e2e runs them."""

from __future__ import annotations

from tests.api_examples import examples
from tests.security.own_process import document


def test_every_operation_has_an_example_and_every_example_is_one_of_an_operation() -> None:
    operations = [(method, path) for path, item in document()["paths"].items() for method in item]
    found = examples()
    without = [
        f"{method.upper()} {path}" for method, path in operations if not any(e.calls(method, path) for e in found)
    ]
    assert without == [], "add them to 'Every call, once' in docs/api.md"
    strays = [e.command for e in found if not any(e.calls(method, path) for method, path in operations)]
    assert strays == []
