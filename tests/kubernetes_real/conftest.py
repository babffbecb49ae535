from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only ``-m kubernetes`` runs these: whoever has a KUBECONFIG and runs all tests means no cluster by that."""
    if config.getoption("-m") == "kubernetes":
        return
    left_out = [item for item in items if item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
