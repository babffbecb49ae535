"""What happens to the memory of weights that are packed while others arrive."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from thaw_runtime.packing import Finisher, Kinds

N_LAYERS = 3


class Rearranged:
    """A method that copies the weight into an order of its own and lets go of it, as oneDNN's does."""

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []

    def process_weights_after_loading(self, module: Any) -> None:
        self.packed.append(self.taken(module.weight.data))
        module.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def taken(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()


class Kept(Rearranged):
    """One that goes on computing with the memory it was given."""

    def taken(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach()


def filled(method: Rearranged) -> list[int]:
    """Where each layer was when its tensor came; layer k is full of k."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(N_LAYERS))
    for layer in model.layers:
        layer.requires_grad_(False).quant_method = method
    names = [f"layers.{k}.weight" for k in range(N_LAYERS)]
    finisher = Finisher(model, names, Kinds(type(method), nn.Embedding, nn.Bilinear, lambda _: nullcontext()))
    places = []
    for k, (name, layer) in enumerate(zip(names, model.layers, strict=True)):
        arrived = torch.full((4, 4), float(k))
        finisher.handing_out(name, arrived)
        places.append(layer.weight.data_ptr())
        layer.weight.data.copy_(arrived)
        del arrived
        finisher.finish_complete()
    return places


def test_a_layer_is_filled_where_one_that_is_packed_was() -> None:
    method = Rearranged()
    assert len(set(filled(method))) == 1
    assert [t.unique().tolist() for t in method.packed] == [[float(k)] for k in range(N_LAYERS)]


def test_memory_that_packing_goes_on_using_is_left_alone() -> None:
    method = Kept()
    assert len(set(filled(method))) == N_LAYERS
    assert [t.unique().tolist() for t in method.packed] == [[float(k)] for k in range(N_LAYERS)]
