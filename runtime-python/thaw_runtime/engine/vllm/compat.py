"""Checks, when it is imported, that the installed vLLM has every name that this folder uses (vllm_names.py).

Raises PlatformError, which says which name is missing.  Without this check, a missing name would cause an ImportError
in some other file, or an AttributeError in the middle of a request.  The check imports nothing that a start does not
need anyway, and takes little time.  A zygote does it once for all its forks.
"""

from __future__ import annotations

import thaw_runtime.engine.vllm.first_import  # noqa: F401  first: any other import of vLLM imports all of it

# isort: split
import vllm
from vllm.platforms import current_platform

from thaw_runtime.engine.vllm.name_check import check
from thaw_runtime.engine.vllm.vllm_names import NAMES

check(NAMES, vllm.__version__, on_cpu=current_platform.is_cpu())
