"""libthaw_params.so through ctypes: its structs, its calls, and its statuses as errors (csrc/include/thaw/params.h).

Calls through ``CDLL`` release the GIL, so a wait blocks no other thread.  The one call through ``PyDLL`` makes a Python
object and does not wait.  Loading takes about 2 ms and needs neither torch nor CUDA.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from ctypes import POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Final

from relay.protocol.segment import error_on_page
from thaw.errors import MemoryTooSmall, PlatformError, ProtocolError, ThawError, Unavailable

ABI_VERSION: Final = 1
MAX_DIMS: Final = 8
_MAX_TEXT: Final = 1500

DTYPES: Final = {
    "BOOL": (0, 1),
    "U8": (1, 1),
    "I8": (2, 1),
    "I16": (3, 2),
    "I32": (4, 4),
    "I64": (5, 8),
    "F16": (6, 2),
    "BF16": (7, 2),
    "F32": (8, 4),
    "F64": (9, 8),
    "F8_E4M3": (10, 1),
    "F8_E5M2": (11, 1),
}
"""(thaw_dtype, bytes per element).  Tensors of the last two types leave as bytes, and the caller must view them."""

TENSOR: Final = struct.Struct("=QQII8qII")
"""thaw_tensor: offset, n_bytes, dtype, n_dims, shape, group, background.  ``struct`` fills it, because a ctypes
structure would cost more time per tensor than all other work.
"""

_NAME: Final = "libthaw_params.so"
_PLACES: Final = (Path(__file__).parents[1] / _NAME, Path(__file__).parents[3] / "build" / "native" / _NAME)
"""The library lies in the package's folder in an image, and in the build folder in a checkout."""

(
    OK,
    TIMED_OUT,
    CLOSED,
    BAD_ARGUMENT,
    BAD_SEGMENT,
    FETCH_FAILED,
    FETCH_DIED,
    OUT_OF_MEMORY,
    SYSTEM,
    NO_DEVICE,
    DEVICE,
) = range(11)


class Failure(ctypes.Structure):
    _fields_ = [("code", c_uint32), ("message", c_char * (_MAX_TEXT + 1)), ("hint", c_char * (_MAX_TEXT + 1))]


class DeviceConfig(ctypes.Structure):
    _fields_ = [
        ("cuda", c_int32),
        ("ordinal", c_int32),
        ("libcuda", c_char_p),
        ("piece_bytes", c_uint64),
        ("in_flight_bytes", c_uint64),
        ("register_bytes", c_uint64),
        ("slot_bytes", c_uint64),
        ("n_slots", c_uint32),
        ("never_register", c_uint32),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("cuda", c_int32),
        ("ordinal", c_int32),
        ("read_only_register", c_int32),
        ("driver_version", c_int32),
        ("context_ns", c_uint64),
        ("registered_bytes", c_uint64),
        ("bounced_bytes", c_uint64),
        ("copied_bytes", c_uint64),
        ("live_bytes", c_uint64),
        ("context", c_size_t),
        ("name", c_char * 96),
    ]


class KvPlane(ctypes.Structure):
    _fields_ = [("base", c_size_t), ("n_blocks", c_uint64), ("block_stride", c_uint64), ("block_bytes", c_uint64)]


_OUT = POINTER(c_void_p)
_CALLS: Final[dict[str, tuple[type | None, list[type]]]] = {
    "thaw_abi_version": (c_int, []),
    "thaw_error": (c_char_p, []),
    "thaw_python": (c_int, [c_void_p] * 5),
    "thaw_segment_open": (c_int, [POINTER(c_int), c_size_t, c_uint64, c_uint64, _OUT]),
    "thaw_segment_address": (c_size_t, [c_void_p]),
    "thaw_segment_wait": (c_int, [c_void_p, c_uint64, c_int64, POINTER(c_uint64)]),
    "thaw_segment_failure": (c_int, [c_void_p, POINTER(Failure)]),
    "thaw_segment_close": (c_int, [c_void_p]),
    "thaw_segment_free": (None, [c_void_p]),
    "thaw_device_open": (c_int, [POINTER(DeviceConfig), _OUT]),
    "thaw_device_ready": (c_int, [c_void_p, c_int64]),
    "thaw_device_describe": (c_int, [c_void_p, POINTER(DeviceInfo)]),
    "thaw_device_free": (None, [c_void_p]),
    "thaw_load_open": (c_int, [c_void_p, c_void_p, c_char_p, c_size_t, c_uint64, _OUT]),
    "thaw_load_wait": (c_int, [c_void_p, c_size_t, c_int64]),
    "thaw_load_wait_stream": (c_int, [c_void_p, c_size_t, c_size_t, c_int64]),
    "thaw_load_tensor": (c_int, [c_void_p, c_size_t, _OUT]),
    "thaw_load_close": (c_int, [c_void_p]),
    "thaw_load_free": (None, [c_void_p]),
    "thaw_kv_open": (c_int, [c_void_p, POINTER(KvPlane), c_size_t, c_size_t, _OUT]),
    "thaw_kv_bytes": (c_uint64, [c_void_p, c_size_t, c_size_t]),
    "thaw_kv_gather": (c_int, [c_void_p, c_size_t, POINTER(c_uint32), c_size_t, c_void_p, c_uint64, c_size_t, _OUT]),
    "thaw_kv_scatter": (c_int, [c_void_p, c_size_t, POINTER(c_uint32), c_size_t, c_void_p, c_uint64, c_size_t, _OUT]),
    "thaw_kv_free": (None, [c_void_p]),
    "thaw_ticket_wait": (c_int, [c_void_p, c_int64]),
    "thaw_ticket_wait_stream": (c_int, [c_void_p, c_size_t, c_int64]),
    "thaw_ticket_free": (None, [c_void_p]),
}
_MOST_NS: Final = 2**62


class Library:
    """The loaded library; ``call`` has every function of the C ABI by its name."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the library cannot be loaded, and ProtocolError when it has another version."""
        self.path = path
        self.call = ctypes.CDLL(str(path))
        for name, (result, arguments) in _CALLS.items():
            function = getattr(self.call, name)
            function.restype, function.argtypes = result, arguments
        if (version := int(self.call.thaw_abi_version())) != ABI_VERSION:
            raise ProtocolError(f"{path} has version {version}; this side calls {ABI_VERSION}", hint="make native")
        api = ctypes.pythonapi
        calls = (api.PyCapsule_New, api.PyCapsule_IsValid, api.PyCapsule_GetPointer, api.Py_IncRef)
        self.check(self.call.thaw_python(*(ctypes.cast(f, c_void_p) for f in calls), id(None)))
        self.make_capsule = ctypes.PyDLL(str(path)).thaw_load_capsule
        """Makes a new "dltensor" capsule from (load, i); None after a failure, see error_text."""
        self.make_capsule.restype, self.make_capsule.argtypes = ctypes.py_object, [c_void_p, c_size_t]

    @property
    def error_text(self) -> str:
        return bytes(self.call.thaw_error()).decode(errors="replace")

    def check(self, status: int) -> None:
        if status != OK:
            raise self.error(status)

    def error(self, status: int) -> Exception:
        """The error for this thread's last failed call.  The segment describes a failed fetch, see fetch_error."""
        text = self.error_text
        if status == BAD_ARGUMENT:
            return ValueError(text)
        if status == BAD_SEGMENT:
            return ProtocolError(text)
        if status == FETCH_DIED:
            return PlatformError(text, hint="fetchd has died or was stopped; see its log")
        if status == OUT_OF_MEMORY:
            return MemoryTooSmall(text)
        if status == NO_DEVICE:
            return Unavailable(text)
        return PlatformError(text)

    def fetch_error(self, segment: c_void_p) -> ThawError:
        failure = Failure()
        self.check(self.call.thaw_segment_failure(segment, failure))
        return error_on_page(
            failure.code, failure.message.decode(errors="replace"), failure.hint.decode(errors="replace")
        )


def find() -> Library:
    """Load the library.  Raises OSError when it was not built or does not run here, ProtocolError for an old build."""
    for path in _PLACES:
        if path.exists():
            return Library(path)
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(_PLACES[-1]))


def timeout_ns(seconds: float) -> int:
    return int(min(max(seconds, 0.0) * 1e9, _MOST_NS))
