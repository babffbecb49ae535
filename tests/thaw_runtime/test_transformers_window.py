"""The window in a decoder of vLLM's Transformers backend: which modules compute, and where the group comes from."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from thaw.errors import ModelUnsupported  # noqa: E402
from thaw_runtime.engine.vllm import transformers_window  # noqa: E402
from thaw_runtime.engine.vllm.transformers_window import enter_later, set_window  # noqa: E402


class Add(torch.nn.Module):
    """Adds a number of its own."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(number))

    def forward(self, hidden: torch.Tensor, position: int = 0) -> torch.Tensor:
        return hidden + self.weight


class Positions(torch.nn.Module):
    """An embedding of positions that the decoder adds to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(10_000.0))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return positions * self.weight


class Decoder(torch.nn.Module):
    """Positions 10,000, embedding 1, layers 10, 20, 40, 80, norm 1000."""

    supports_pp_plan = False

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.embed, self.positions, self.layers, self.norm = Add(1.0), Positions(), layers, Add(1000.0)

    def get_decoder(self) -> Decoder:
        return self

    def forward(self, hidden: torch.Tensor) -> float:
        hidden = self.embed(hidden) + self.positions(torch.tensor(1))
        for layer in self.layers:  # type: ignore[attr-defined]
            hidden = layer(hidden=hidden, position=1)
        return float(self.norm(hidden).detach())


class Base(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.pp_group = model, "the group of its construction"


class Removed(torch.nn.Module):  # type: ignore[misc]
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setitem(sys.modules, transformers_window._BACKEND, SimpleNamespace(Base=Base))
    return object()


def layers() -> torch.nn.ModuleList:
    return torch.nn.ModuleList(map(Add, (10.0, 20.0, 40.0, 80.0)))


@pytest.mark.parametrize(
    ("window", "total"), [((0, 2), 10_031.0), ((1, 3), 60.0), ((2, 4), 1120.0), ((0, 4), 11_151.0)]
)
def test_only_the_modules_of_the_window_compute_and_all_keep_their_weights(
    group: object, window: tuple[int, int], total: float
) -> None:
    base: Any = Base(Decoder(layers()))
    names = [name for name, _ in base.named_parameters()]
    set_window(base, (0, 1), group)
    set_window(base, window, group)
    assert base.model(torch.tensor(0.0)) == total
    assert [name for name, _ in base.named_parameters()] == names
    assert (base.pp_group, base.start_layer, base.end_layer) == (group, *window)


def test_a_decoder_without_a_list_of_layers_is_unsupported(group: object) -> None:
    with pytest.raises(ModelUnsupported, match="Decoder has no list of layers") as caught:
        set_window(Base(Decoder(torch.nn.Sequential(Add(1.0)))), (0, 1), group)
    assert "max_stages" in caught.value.hint


def test_a_model_of_vllm_itself_is_left_alone(group: object) -> None:
    model = Decoder(layers())
    set_window(model, (0, 1), group)
    assert model(torch.tensor(0.0)) == 11_151.0


def test_a_later_stage_adds_no_positions_to_the_hidden_states_of_the_one_before(group: object) -> None:
    base: Any = Base(Decoder(layers()))
    base.model.embed, base.model.positions = Removed(), Removed()  # as the backend does
    enter_later(base, Removed)
    assert base.model(torch.tensor(0.0)) == 1150.0
