"""The window of layers (window.py) in a model of vLLM's Transformers backend.

vLLM's own models loop over ``[start_layer, end_layer)`` and ask the pipeline group for their place at every batch.  A
model of this backend runs the decoder that Transformers wrote, which loops over all its layers, and it keeps the group
that there was when it was built.  So it gets the present group, and the modules of other stages return their input
unchanged, as vLLM's own PPMissingLayer does.  The modules stay where they are, so that their weights can be loaded
meanwhile.

This file imports no vLLM, so its tests need none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch

from thaw.errors import ModelUnsupported

_CHANGES_NOTHING: Final = (torch.nn.Dropout, torch.nn.Identity)
_BACKEND: Final = "vllm.model_executor.models.transformers.base"


class _Decoder(NamedTuple):
    """The modules with weights, as the backend divides them among stages."""

    before: list[torch.nn.Module]
    layers: list[torch.nn.Module]
    after: list[torch.nn.Module]


def set_window(model: torch.nn.Module, layers: tuple[int, int], group: Any) -> None:
    """From the next batch on, layers ``[a, b)`` compute, if this is a model of the backend.  ``group`` is the present
    pipeline group."""
    for base in _of_backend(model):
        decoder, (begin, end) = _decoder_of(base), layers
        base.pp_group = group
        base.start_layer, base.end_layer = layers
        for i, layer in enumerate(decoder.layers):
            _let_compute(layer, begin <= i < end)
        for module in decoder.before:
            _let_compute(module, begin == 0, _enter)
        for module in decoder.after:
            _let_compute(module, end == len(decoder.layers))


def enter_later(model: torch.nn.Module, removed: type[torch.nn.Module]) -> None:
    """Let a low-memory stage that is not the first take the hidden states of the one before, if this is a model of the
    backend, which has put modules of the type ``removed`` before the layers."""
    for base in _of_backend(model):
        for child in _owner_of(base).children():
            if isinstance(child, torch.nn.ModuleList):
                break
            if isinstance(child, removed):
                _let_compute(child, False, _enter)


@contextmanager
def weightless_steps(model: torch.nn.Module | None) -> Iterator[set[str]]:
    """While the block runs, note the classes of the modules that a decoder calls beside its layers, that compute a
    tensor, and that the backend gives to no stage, because they have no weights and no plan of the library names them.
    Every stage would compute them, like NanoChat's norm."""
    found: set[str] = set()
    hooks = []
    for base in _of_backend(model) if model is not None else ():
        decoder = _decoder_of(base)
        divided = {id(module) for module in (*decoder.before, *decoder.after)}
        for child in _owner_of(base).children():
            is_layers = isinstance(child, torch.nn.ModuleList)
            if id(child) not in divided and not is_layers and not isinstance(child, _CHANGES_NOTHING):
                hooks.append(child.register_forward_hook(partial(_note_step, found)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _note_step(found: set[str], module: torch.nn.Module, _: Any, made: Any) -> None:
    if isinstance(made, torch.Tensor):  # a rotary embedding gives a pair
        found.add(type(module).__name__)


def _of_backend(model: torch.nn.Module) -> Iterator[Any]:
    """The backend takes long to import, and most models have nothing to do with it."""
    backend = sys.modules.get(_BACKEND)
    return (m for m in model.modules() if backend is not None and isinstance(m, backend.Base))


def _decoder_of(base: Any) -> _Decoder:
    """Divide as ``Base.pipeline_parallel()`` does.  Raises ModelUnsupported for a decoder without a list of layers."""
    owner = _owner_of(base)
    if owner is base.model and base.model.supports_pp_plan:
        names = list(base.model._pp_plan)
    else:
        names = [n for n, child in owner.named_children() if next(child.parameters(), None) is not None]
    modules = [attrgetter(name)(owner) for name in names]
    at = next((i for i, module in enumerate(modules) if isinstance(module, torch.nn.ModuleList)), None)
    if at is None:
        raise ModelUnsupported(
            f"{type(owner).__name__} has no list of layers that could be divided into stages",
            hint="set scaling.max_stages to 1 in the function's config",
        )
    return _Decoder(modules[:at], list(modules[at]), modules[at + 1 :])


def _owner_of(base: Any) -> Any:
    return base.model if base.model.supports_pp_plan else base.model.get_decoder()


def _let_compute(module: Any, computes: bool, otherwise: Callable[..., Any] | None = None) -> None:
    if computes:
        vars(module).pop("forward", None)
    else:
        module.forward = otherwise or _pass_on


def _pass_on(*args: Any, **named: Any) -> Any:
    return args[0] if args else next(iter(named.values()))


def _enter(*args: Any, **named: Any) -> Any:
    """Stand for a module before the layers: a norm passes on hidden states, and an embedding of positions, which the
    decoder adds to them in every stage, adds nothing."""
    given = _pass_on(*args, **named)
    return given if given.is_floating_point() else torch.zeros((), device=given.device)
