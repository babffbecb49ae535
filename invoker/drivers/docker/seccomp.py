"""The system calls that a function's container may make: ``seccomp.json`` beside this file, in the engine's format.

It is an allow list, close to the documented default of Docker for a container without capabilities, and it is the same
whatever version the engine has.  It leaves out calls that a function does not need and an attacker could use:

* ``io_uring_*``: older engines allow it, and its operations bypass every other rule here;
* sockets other than unix, internet and netlink: AF_VSOCK leads to the hypervisor, past the missing network;
* ``userfaultfd``, ``perf_event_open``, ``bpf``, ``keyctl``, ``add_key``, ``request_key``, ``ptrace``,
  ``process_vm_*``: help for attacks on the kernel, on neighbours and on the container's proxy;
* the calls of 32-bit programs, which have numbers and arguments of their own.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources


@cache
def profile() -> str:
    """The value of the engine's security option ``seccomp``: the profile itself, and not its path."""
    text = resources.files(__package__).joinpath("seccomp.json").read_text()
    return json.dumps(json.loads(text), separators=(",", ":"))
