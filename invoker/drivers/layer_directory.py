"""The directory of a host's layers: the packages that it has installed for functions, a folder for each set of them.

Every container of a function has the directory, because a stem cell is made before its function is known.  Nobody but
the invoker can list it, and the name of a layer cannot be guessed (invoker/packages/layers.py), so a function finds its
own layer alone.
"""

from __future__ import annotations

from pathlib import Path


def layers_of(run_dir: Path) -> Path:
    directory = run_dir / "packages"
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o711)
    return directory
