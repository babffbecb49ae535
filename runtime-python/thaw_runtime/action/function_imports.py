"""Restrict a function's imports to the standard library, its image's packages (THAW_PACKAGES) and those in its zip.

The interpreter that runs the function could import more: the platform's own packages if containers are processes, and
pip in an image.  Before user code is loaded, this module makes all of that unreachable, so that a function that runs
under one driver also runs under the other (docs/functions.md).  This is a promise about names and no protection: code
may extend ``sys.path``.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from typing import Final

PACKAGES: Final = "THAW_PACKAGES"
"""The variable that names the folder where an image keeps the packages that it adds for functions."""
_FINDERS: Final = (BuiltinImporter, FrozenImporter, PathFinder)
_PATH_HOOKS: Final = ("zipimport", "_frozen_importlib_external")


def confine(environ: dict[str, str] | os._Environ[str]) -> None:
    """Restrict the imports of this process permanently.

    Modules that a function may not import are removed from ``sys.modules`` if they were imported before.  Code that
    already refers to them continues to use them.
    """
    sys.path[:] = _standard_library()
    packages = environ.get(PACKAGES, "")
    if os.path.isdir(packages):
        sys.path.append(packages)
    environ.pop("PYTHONPATH", None)  # so that interpreters that the function starts do not inherit it
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder in _FINDERS]  # editable installs add their own
    sys.path_hooks[:] = [hook for hook in sys.path_hooks if hook.__module__ in _PATH_HOOKS]
    sys.path_importer_cache.clear()
    for name in list(sys.modules):
        if name != "__main__" and name.partition(".")[0] not in sys.stdlib_module_names:
            del sys.modules[name]


def _standard_library() -> list[str]:
    """The folders of the standard library, without the site-packages inside it."""
    library = os.path.dirname(os.__file__)
    archive = os.path.join(os.path.dirname(library), f"python{sys.version_info[0]}{sys.version_info[1]}.zip")
    return [archive, library, os.path.join(library, "lib-dynload")]
