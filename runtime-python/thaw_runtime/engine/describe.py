"""``python -m thaw_runtime.engine.describe``: what an engine computes with here, in one line (``thaw dev doctor``)."""

from __future__ import annotations

from thaw.errors import ThawError
from thaw_runtime.engine.registry import engine_of_process


def main() -> None:
    try:
        print(engine_of_process().describe())
    except ThawError as e:
        raise SystemExit(f"{e.message}; {e.hint}") from e


if __name__ == "__main__":
    main()
