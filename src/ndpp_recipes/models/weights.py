"""Weights that fit a network but for its last layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from ..errors import RecipeError


def load_(model: nn.Module, state: Mapping[str, Tensor], heads: Collection[str]) -> list[str]:
    """Load all that fits; entries of the modules `heads` may be of another shape. Returns those left as they were."""
    own = model.state_dict()
    differ = [name for name, value in state.items() if name in own and own[name].shape != value.shape]
    wrong = [name for name in differ if name.rpartition(".")[0] not in heads]
    if wrong:
        sizes = f"{tuple(state[wrong[0]].shape)} instead of {tuple(own[wrong[0]].shape)}"
        raise RecipeError(f"the weights are of another network: {wrong[0]} is {sizes} ({len(wrong)} entries differ)")
    absent = [name for name in own if name not in state and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in state if name not in own]
    if absent or unexpected:
        raise RecipeError(
            f"the weights are of another network: {len(absent)} entries are missing{_first(absent)}, "
            f"{len(unexpected)} are not known{_first(unexpected)}"
        )
    model.load_state_dict({name: value for name, value in state.items() if name not in differ}, strict=False)
    return differ


def _first(names: list[str]) -> str:
    return f" ({names[0]}{', ...' if len(names) > 1 else ''})" if names else ""
