"""The parameter manager in Python: both readers behave alike, tensors outlive their segment, and missing parts are
reported.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from relay.protocol.messages import SegmentOffer
from relay.protocol.segment import SegmentReader
from tests.native.readers import FILE, SLAB_BYTES, Made, make_segment, tensor
from thaw.errors import ErrorInfo, ModelCorrupt, ModelUnsupported, PlatformError, ProtocolError, Unavailable
from thaw.model import TensorInfo
from thaw_runtime.weights import native_library, parameter_manager
from thaw_runtime.weights.arriving import arriving
from thaw_runtime.weights.native_library import KvPlane, Library
from thaw_runtime.weights.parameter_manager import KvBlocks, NativeSegment, ParameterManager
from thaw_runtime.weights.readable_segment import Segment

ROOT = Path(__file__).parents[2]
OpenReader = Callable[[SegmentOffer, list[int]], Segment]
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.fixture(params=["python", "native"])
def reader(request: pytest.FixtureRequest) -> OpenReader:
    if request.param == "python":
        return SegmentReader
    manager = ParameterManager(request.getfixturevalue("library"))
    return lambda offer, fds: NativeSegment(manager, offer, fds)


@pytest.fixture
def made() -> Iterator[Made]:
    segment = make_segment(SLAB_BYTES + 8192)
    yield segment
    segment.close()


# ── both readers ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_view_crosses_slabs_is_read_only_and_stays_after_close(reader: OpenReader, made: Made) -> None:
    made.write(SLAB_BYTES - 3, b"abcdef")
    made.page.complete()
    segment = reader(made.offer, made.own_fds())
    view = segment.view(SLAB_BYTES - 3, 6)
    segment.close()
    assert bytes(view) == b"abcdef"
    assert view.readonly
    with pytest.raises(ValueError, match="outside the segment"):
        reader(made.offer, made.own_fds()).view(made.offer.n_bytes, 1)


def test_a_waiter_is_woken_and_others_run_meanwhile(reader: OpenReader, made: Made) -> None:
    segment = reader(made.offer, made.own_fds())
    ends: list[int] = []
    waiter = threading.Thread(target=lambda: ends.append(segment.wait(1000, 30.0)))
    waiter.start()
    made.page.advance(999)
    made.page.advance(1500)
    waiter.join(30)
    assert ends == [1500]
    assert segment.wait(0, 0.0) == 1500


def test_errors_are_the_fetchs_own(reader: OpenReader, made: Made) -> None:
    segment = reader(made.offer, made.own_fds())
    with pytest.raises(PlatformError, match=r"0 of the 5 bytes wanted had arrived after 0.01 s"):
        segment.wait(5, 0.01)
    made.page.advance(4096)
    made.page.fail(ErrorInfo("ModelCorrupt", "chunk 3 – twice", "push again"))
    assert segment.wait(4096, 0.0) == 4096
    with pytest.raises(ModelCorrupt, match="chunk 3 – twice") as caught:
        segment.wait(4097, 30.0)
    assert caught.value.hint == "push again"
    with pytest.raises(ValueError, match="waiting for byte"):
        segment.wait(made.offer.n_bytes + 1, 0.0)


def test_a_page_that_lies_is_refused(reader: OpenReader, made: Made) -> None:
    made.page.advance(2**60)
    with pytest.raises(ProtocolError, match="control page ends at"):
        reader(made.offer, made.own_fds()).wait(1, 0.0)
    made.page_bytes[0:4] = b"XXXX"
    with pytest.raises(ProtocolError, match="not a control page"):
        reader(made.offer, made.own_fds())
    fds = made.own_fds()[:-1]
    with pytest.raises(ProtocolError, match="came with 2 descriptors"):
        reader(made.offer, fds)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])


KINDS = [
    ("BOOL", 1, torch.bool),
    ("U8", 1, torch.uint8),
    ("I8", 1, torch.int8),
    ("I16", 2, torch.int16),
    ("I32", 4, torch.int32),
    ("I64", 8, torch.int64),
    ("F16", 2, torch.float16),
    ("BF16", 2, torch.bfloat16),
    ("F32", 4, torch.float32),
    ("F64", 8, torch.float64),
    ("F8_E4M3", 1, torch.float8_e4m3fn),
    ("F8_E5M2", 1, torch.float8_e5m2),
]


def test_tensors_are_the_segments_bytes_in_every_dtype(reader: OpenReader) -> None:
    tensors, at = [], 64
    for name, item_bytes, _ in KINDS:
        for shape in ((3, 5), (), (0, 4), (7,)):
            tensors.append(tensor(f"{name}{shape}", at, name, item_bytes, shape))
            at += tensors[-1].n_bytes + 8 - tensors[-1].n_bytes % 8
    made = make_segment(SLAB_BYTES, tensors)
    data = bytes(i % 2 for i in range(at))
    made.write(4096, data)
    made.page.complete()
    source = arriving(reader(made.offer, made.own_fds()), tensors)
    for i, info in enumerate(tensors):
        source.wait(i, 1.0)
        got = source.take(i)
        assert got.dtype == KINDS[i // 4][2]
        assert tuple(got.shape) == info.shape
        raw = got.reshape(-1).view(torch.uint8) if info.n_bytes else torch.empty(0, dtype=torch.uint8)
        assert bytes(raw.tolist()) == data[info.offset : info.offset + info.n_bytes]
    made.close()


@pytest.mark.parametrize(
    ("info", "error"),
    [
        (tensor("t", 0, "F4", 1, (2,)), ModelUnsupported),
        (TensorInfo("t", FILE, 0, 7, "F32", (2,)), ModelCorrupt),
        (tensor("t", SLAB_BYTES * 8, "U8", 1, (2,)), KeyError),
    ],
)
def test_tensors_nobody_can_have_are_refused(
    reader: OpenReader, made: Made, info: TensorInfo, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"tensor t|does not hold"):
        arriving(reader(made.offer, made.own_fds()), [info])


def test_a_tensor_comes_with_its_last_byte(reader: OpenReader, made: Made) -> None:
    segment = reader(made.offer, made.own_fds())
    source = arriving(segment, [tensor("a", 0, "U8", 1, (100,)), tensor("b", 100, "U8", 1, (100,))])
    made.write(4096, b"\x07" * 200)
    made.page.advance(4096 + 150)
    source.wait(0, 1.0)
    assert source.take(0).tolist() == [7] * 100
    with pytest.raises(PlatformError, match="4246 of the 4296 bytes wanted"):
        source.wait(1, 0.01)
    made.page.complete()
    source.wait(1, 1.0)
    assert source.take(1).tolist() == [7] * 100


# ── the native reader ─────────────────────────────────────────────────────────────────────────────────────────────


def native(library: Library, made: Made) -> NativeSegment:
    return NativeSegment(ParameterManager(library), made.offer, made.own_fds())


def mappings(name: str) -> int:
    return sum(name in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_the_mapping_goes_with_the_last_tensor_or_unused_capsule(library: Library) -> None:
    name = "life-of-a-tensor"
    made = make_segment(SLAB_BYTES, name=name)
    made.page.complete()
    of_the_writer = mappings(name)
    segment = native(library, made)
    load = segment.load([tensor("a", 0, "U8", 1, (16,)), tensor("b", 16, "U8", 1, (16,))])
    taken, unused = torch.from_dlpack(load.capsule(0)), load.capsule(1)
    with pytest.raises(ValueError, match="tensor 0 was taken before"):
        load.capsule(0)
    segment.close()
    del segment, load
    made.close()
    gc.collect()
    assert mappings(name) > of_the_writer
    assert taken.tolist() == [0] * 16
    del taken
    assert mappings(name) > of_the_writer
    del unused
    assert mappings(name) == of_the_writer


def test_close_wakes_who_waits(library: Library, made: Made) -> None:
    segment = native(library, made)
    errors: list[str] = []

    def wait() -> None:
        try:
            segment.wait(10, 60.0)
        except PlatformError as e:
            errors.append(str(e))

    waiter = threading.Thread(target=wait)
    waiter.start()
    segment.close()
    waiter.join(30)
    assert errors == ["the segment was closed"]


def test_the_manager_starts_without_a_heavy_import(library: Library) -> None:
    program = "import sys; from thaw_runtime.engine import main as engine_main; from thaw_runtime.weights import parameter_manager as p; assert p.start() is not None; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_without_the_library_the_python_reader_is_used_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_library, "_PLACES", (Path("/nowhere/libthaw_params.so"),))
    parameter_manager.start.cache_clear()
    try:
        for _ in range(2):
            segment = parameter_manager.open_segment(made.offer, made.own_fds())
            assert isinstance(segment, SegmentReader)
            segment.close()
        said = capsys.readouterr().err
        assert said.count("native_library_missing") == 1
        assert "/nowhere/libthaw_params.so" in said
        assert "make native" in said
    finally:
        parameter_manager.start.cache_clear()


WANTS_CUDA = """
from thaw_runtime.weights import parameter_manager
parameter_manager._wants_cuda = lambda: True
print([m is not None and m.cuda for m in {parameter_manager.start() for _ in range(2)}])
"""


def test_without_a_cuda_driver_tensors_stay_on_the_host_and_that_is_said_once(library: Library) -> None:
    with pytest.raises(Unavailable, match="libnowhere"):
        ParameterManager(library, cuda=True, libcuda="libnowhere.so.1")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    # this needs another process: the fake driver has the real one's name and may be loaded in this process already
    done = subprocess.run([sys.executable, "-c", WANTS_CUDA], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[False]"
    assert done.stderr.count("no_cuda_device") == 1


def test_another_abi_is_refused(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    monkeypatch.setattr(native_library, "ABI_VERSION", 99)
    with pytest.raises(ProtocolError, match="has version 1; this side calls 99"):
        Library(library.path)


def test_kv_blocks_go_out_and_in_again(library: Library) -> None:
    manager = ParameterManager(library)
    caches = [torch.arange(2 * 8 * 16, dtype=torch.float32).reshape(2, 8, 16) + 1000 * i for i in range(4)]

    def blocks_of(layers: list[torch.Tensor]) -> KvBlocks:
        return KvBlocks(manager, [[KvPlane(plane.data_ptr(), 8, 64, 64) for plane in layer] for layer in layers])

    source, target = blocks_of(caches[:2]), blocks_of(caches[2:])
    chunk = source.gather(1, [5, 6, 0]).wait(30.0)
    assert chunk == caches[1][:, [5, 6, 0]].contiguous().numpy().tobytes()
    with target.scatter(0, [1, 2, 7], chunk):
        pass  # leaving the block waits for the copy
    chunk.clear()  # this releases the buffer
    assert torch.equal(caches[2][:, [1, 2, 7]], caches[1][:, [5, 6, 0]])
    with pytest.raises(ValueError, match="block 8 of 8"):
        source.gather(0, [8])


# ── with the fake CUDA driver ─────────────────────────────────────────────────────────────────────────────────────


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def fake_driver() -> str:
    return str(ROOT / "build/native/plain/fake/libcuda.so.1")


def test_on_a_device_the_capsule_holds_a_copy(library: Library, made: Made) -> None:
    manager = ParameterManager(library, cuda=True, libcuda=fake_driver())
    manager.ready(30.0)
    segment = NativeSegment(manager, made.offer, made.own_fds())
    load = segment.load([tensor("a", 0, "BF16", 2, (8, 4)), tensor("b", 64, "F32", 4, (3,))])
    made.write(4096, bytes(range(76)))
    made.page.advance(4096 + 64)
    load.wait(0, 30.0)
    made.page.complete()
    load.wait(1, 30.0, stream=0)
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype, api.PyCapsule_GetPointer.argtypes = (
        ctypes.c_void_p,
        [ctypes.py_object, ctypes.c_char_p],
    )
    capsule = load.capsule(0)
    dl = _DLTensor.from_address(api.PyCapsule_GetPointer(capsule, b"dltensor"))
    assert (dl.device_type, dl.device_id) == (2, 0)
    assert ctypes.string_at(dl.data, 64) == bytes(range(64))
    state = manager.state()
    assert state.cuda
    assert state.read_only_register
    assert "fake" in state.name


def test_a_fetch_that_fails_on_its_way_to_the_device_says_so(library: Library, made: Made) -> None:
    manager = ParameterManager(library, cuda=True, libcuda=fake_driver())
    segment = NativeSegment(manager, made.offer, made.own_fds())
    load = segment.load([tensor("a", 0, "U8", 1, (8,))])
    made.page.fail(ErrorInfo("StoreUnavailable", "503", "later"))
    with pytest.raises(PlatformError, match="503") as caught:
        load.wait(0, 30.0)
    assert caught.value.code == "StoreUnavailable"
    load.close()
