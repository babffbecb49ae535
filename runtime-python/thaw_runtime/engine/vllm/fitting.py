"""Compare a checkpoint's tensors with an empty model: the model's own loader takes them by name, type and shape alone.

The loader knows what each tensor is called in vLLM, which ones are joined and which ones are left out.  It gets tensors
on torch's *meta* device, which have no bytes; this module lets it copy them, counts how many elements each parameter
has received, and writes none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thaw.errors import DeveloperError, ModelCorrupt, ModelUnsupported
from thaw.model import TensorInfo
from thaw_runtime.engine.vllm.errors import translated
from thaw_runtime.shown import shown
from thaw_runtime.weights.arriving import DTYPES

_MOST_NAMED: Final = 3
_PUSH: Final = "push the whole checkpoint again, or correct its config.json"


def check_tensors(model: torch.nn.Module, tensors: Sequence[TensorInfo], *, quantised: bool) -> None:
    """Raises ModelCorrupt if the checkpoint lacks a tensor of the model, or part of one, or has one that does not fit.

    Quantised layers have parameters that many checkpoints lack (an offset, the scale of an activation).  One counts as
    missing if another layer of the same kind has received its own."""
    counted = _Counted()
    given = _Given(tensors, counted)
    parameters = dict(model.named_parameters())  # a loader may replace some
    try:
        with torch.no_grad(), counted:
            loaded: set[str] | None = model.load_weights(iter(given))
    except DeveloperError:
        raise
    except Exception as e:
        if _needs_bytes(e):
            return
        raise _unfit(given.last, e) from e
    now = dict(model.named_parameters())
    missing = [name for name, p in parameters.items() if not _is_filled(name, p, now.get(name), counted, loaded)]
    if quantised:
        missing = of_filled_kinds(model, missing)
    if (cut := given.partly_used()) is not None:
        raise ModelCorrupt(
            f"the checkpoint's tensor {shown(cut.name)}, {cut.dtype} {list(cut.shape)}, is larger than the one that "
            "the model has by its config.json",
            hint=_PUSH,
        )
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise ModelCorrupt(
            f"the checkpoint lacks {', '.join(missing[:_MOST_NAMED])}{more}, or a part of it, which the model has by "
            "its config.json",
            hint=_PUSH,
        )


class _Given:
    """The tensors without their bytes, in load order."""

    def __init__(self, tensors: Sequence[TensorInfo], counted: _Counted) -> None:
        self._tensors, self._counted = tensors, counted
        self._made: list[tuple[TensorInfo, torch.Tensor]] = []  # kept, because a storage is known by its address
        self.last: TensorInfo | None = None

    def partly_used(self) -> TensorInfo | None:
        """Return a tensor of which the loader has copied a part: some loaders cut off what does not fit.  It
        knows nothing about a tensor that they changed first."""
        for info, made in self._made:
            if 0 < self._counted.taken_from(made) < made.numel():
                return info
        return None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for info in self._tensors:
            if info.dtype not in DTYPES:
                raise ModelUnsupported(f"tensor {info.name} has dtype {info.dtype}, which the engine does not have")
            self.last = info
            made = torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
            self._counted.begin(made)
            self._made.append((info, made))
            yield info.name, made


class _Counted(TorchDispatchMode):
    """Carries out no copy of a tensor without bytes, and no filling, and counts the elements by parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._n_elements: dict[int, int] = {}
        self._n_taken: dict[int, int] = {}

    def begin(self, source: torch.Tensor) -> None:
        """Nothing has been taken from a new tensor, though one that is gone may have had the same address."""
        self._n_taken.pop(source.untyped_storage()._cdata, None)

    def taken_from(self, source: torch.Tensor) -> int:
        return self._n_taken.get(source.untyped_storage()._cdata, 0)

    def of(self, parameter: torch.Tensor) -> int:
        return self._n_elements.get(parameter.untyped_storage().data_ptr(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            target, source = args[:2]
            if torch.broadcast_shapes(target.shape, source.shape) != target.shape:
                raise ValueError(f"{tuple(source.shape)} does not fit {tuple(target.shape)}")
            storage = source.untyped_storage()._cdata
            self._n_taken[storage] = self._n_taken.get(storage, 0) + source.numel()
            return self._noted(target)
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            return self._noted(args[0])
        return func(*args, **(kwargs or {}))

    def _noted(self, target: torch.Tensor) -> torch.Tensor:
        if not target.is_meta:
            where = target.untyped_storage().data_ptr()
            self._n_elements[where] = self._n_elements.get(where, 0) + target.numel()
        return target


def _is_filled(
    name: str, before: torch.Tensor, now: torch.Tensor | None, counted: _Counted, loaded: set[str] | None
) -> bool:
    if now is None or now.is_meta:  # the loader has put the tensor itself there
        return True
    n_elements = counted.of(before)
    return n_elements >= before.numel() or (n_elements == 0 and loaded is not None and name in loaded)


def of_filled_kinds(model: torch.nn.Module, missing: Collection[str]) -> list[str]:
    """Return those of ``missing`` whose like is filled in another layer with the same method."""
    kinds: dict[tuple[str, str], list[bool]] = {}
    of_name: dict[str, tuple[str, str]] = {}
    for path, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        for leaf, _ in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}" if path else leaf
            of_name[name] = (method, leaf)
            kinds.setdefault(of_name[name], []).append(name not in missing)
    return [name for name in missing if any(kinds.get(of_name.get(name, ("", "")), ()))]


def _needs_bytes(error: Exception) -> bool:
    """Return whether a loader has looked at the numbers of a tensor, which nobody has here."""
    return "meta" in str(error).lower()


def _unfit(last: TensorInfo | None, error: Exception) -> ModelCorrupt:
    if last is None:
        return ModelCorrupt("the checkpoint has no tensors", hint=_PUSH)
    said = translated(error).message
    return ModelCorrupt(
        f"the checkpoint's tensor {shown(last.name)}, {last.dtype} {list(last.shape)}, does not fit the model: {said}",
        hint=_PUSH,
    )
