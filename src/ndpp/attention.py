"""Multi-head attention on decorrelated data: torch.nn's module, its four weights as they are, each used as D·W."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from . import masking, whitening
from .decorrelated import Decorrelated
from .geometry import pointwise_grid
from .layers import Linear
from .products import linear
from .settings import Settings
from .statistics import RunningMoments

INPUTS = ("q_proj", "k_proj", "v_proj")
torch_functional: Any = F  # with those of its functions that have no type


class Projection(Decorrelated):
    """The statistics of one input of attention, each position of which is a row. The weight is the attention's."""

    _default_block = 256
    _per_row_scale = True

    def __init__(self, features: int, settings: Settings | None, like: Tensor) -> None:
        super().__init__()
        self.features = features
        self._setup(settings, groups=1, channels=features, kernel=(), like=like)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, others: Sequence[RunningMoments] = ()) -> Tensor:
        """S·X·D·w + b of (batch, length, features) or (length, features)."""
        grid = pointwise_grid(x.shape[1:-1])
        y: Tensor = self._call(self._product, x.movedim(-1, 1), grid, linear, weight, bias, others)
        return y

    def reset_parameters(self) -> None:
        """There are none here: only the statistics are reset."""
        self.reset_running_stats()

    def extra_repr(self) -> str:
        return f"{self.features}, settings={self.settings!r}"


class _SlowPath(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by its slow path: the fast ones read the weights, and would leave D and S out."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch.nn. Keys marked as padding take no part in statistics; in self-attention nor do those queries."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise AssertionError("NestedTensors are for fast paths only; set encoder.use_nested_tensor = False")
        other = F._none_or_dtype(attn_mask)
        padding = F._canonical_mask(key_padding_mask, "key_padding_mask", other, "attn_mask", query.dtype)
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
        batched = torch_functional._mha_shape_check(query, key, value, padding, mask, self.num_heads)
        turned = batched and not self.batch_first
        inputs = [x.transpose(0, 1) for x in (query, key, value)] if turned else [query, key, value]
        causal = is_causal and padding is None and not need_weights  # only then does torch go by the hint
        added = None if causal else mask
        if (is_causal and mask is None) or not self._accepts(inputs, padding, added):
            view = query.view_as(query)  # not the same as the key, so that no fast path comes before torch's own error
            super().forward(view, key, value, key_padding_mask, need_weights, attn_mask, is_causal=is_causal)
            raise AssertionError("torch.nn takes these arguments and ndpp does not; please report them")
        # Positions that count: an active mask is that of the queries; keys of another sequence have their own.
        is_self = query is key
        of_keys = None if padding is None or (is_self and masking.active() is not None) else ~torch.isneginf(padding)
        of_queries = of_keys if is_self else None
        if is_self and key is value and self._are_one():
            with _counting(of_keys):
                q, k, v = self._project_all(inputs[0])
        else:
            with _counting(of_queries):
                q = self._project(0, inputs[0])
            with _counting(of_keys) if is_self else masking.mask(of_keys):
                k, v = self._project(1, inputs[1]), self._project(2, inputs[2])
        if not batched:
            q, k, v = q[None], k[None], v[None]
        y, weights = self._attend(q, k, v, self._merged(added, padding, len(q)), need_weights, causal)
        with _counting(of_queries):
            y = self.out_proj(y if batched else y[0])
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return y.transpose(0, 1) if turned else y, weights if weights is None or batched else weights[0]

    def _project(self, index: int, x: Tensor) -> Tensor:
        """Query, key or value (by index) as attention compares and sums them."""
        raise NotImplementedError

    def _are_one(self) -> bool:
        """Whether query, key and value of one input may be one product, by one D."""
        return False

    def _project_all(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of one input."""
        raise NotImplementedError

    def _in_weights(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Weights and biases of query, key and value, packed in one parameter or not."""
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = self.in_proj_weight.chunk(3) if self._qkv_same_embed_dim else separate
        return weights, (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)

    def _accepts(self, inputs: Sequence[Tensor], padding: Tensor | None, mask: Tensor | None) -> bool:
        """Whether torch.nn would take these, laid out as (batch, length, features) or (length, features)."""
        query, key, value = inputs
        lengths = (query.shape[-2], key.shape[-2])
        each = (query.shape[:-2].numel() * self.num_heads, *lengths)
        return (
            [x.shape[-1] for x in inputs] == [self.embed_dim, self.kdim, self.vdim]
            and key.shape[:-1] == value.shape[:-1]
            and key.shape[:-2] == query.shape[:-2]
            and (padding is None or padding.shape == key.shape[:-1])
            and (mask is None or tuple(mask.shape) in (lengths, each))
        )

    def _merged(self, mask: Tensor | None, padding: Tensor | None, batch: int) -> Tensor | None:
        """What is added to the scores: (queries, keys) or (batch·heads, 1 or queries, keys)."""
        if padding is None:
            return mask
        padding = padding.reshape(batch, 1, padding.shape[-1]).repeat_interleave(self.num_heads, 0)
        return padding if mask is None else mask + padding

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """From (batch, length, embed) to what out_proj takes, and weights (batch, heads, queries, keys)."""
        batch, heads = len(q), self.num_heads
        more = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            more.append((k.new_zeros(1, 1, self.embed_dim), v.new_zeros(1, 1, self.embed_dim)))
        for more_k, more_v in more:  # keys that every query sees
            k = torch.cat([k, more_k.expand(batch, -1, -1)], 1)
            v = torch.cat([v, more_v.expand(batch, -1, -1)], 1)
            mask = None if mask is None else F.pad(mask, (0, 1))
        q, k, v = (x.reshape(*x.shape[:2], heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            if mask is not None and mask.dim() == 3:
                mask = mask.reshape(batch, heads, *mask.shape[1:])
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal).transpose(1, 2).flatten(2), None
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        q = q * math.sqrt(1.0 / self.head_dim)
        scores = torch.bmm(q, k.mT) if mask is None else torch.baddbmm(mask, q, k.mT)
        weights = F.dropout(scores.softmax(-1), dropout)
        y = torch.bmm(weights, v).reshape(batch, heads, q.shape[1], self.head_dim).transpose(1, 2).flatten(2)
        return y, weights.reshape(batch, heads, *weights.shape[1:])


class MultiheadAttention(_SlowPath):
    """torch.nn.MultiheadAttention on decorrelated queries, keys, values and outputs."""

    _version = 2  # of the state_dict; 1 is torch.nn's, which holds no statistics

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        more = (add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype)
        super().__init__(embed_dim, num_heads, dropout, bias, *more)
        self._decorrelate(settings)

    def _decorrelate(self, settings: Settings | None) -> None:
        """Make an initialised stock module, whose class has just become this one, decorrelate."""
        weights, _ = self._in_weights()
        for name, weight in zip(INPUTS, weights, strict=True):
            projection = Projection(weight.shape[1], settings, weight)
            projection._label = f"ndpp.MultiheadAttention({self.embed_dim}, {self.num_heads}).{name}"
            self.add_module(name, projection.train(self.training))
        out: Any = self.out_proj
        if type(out) in (nn.Linear, NonDynamicallyQuantizableLinear):
            out.__class__ = Linear
            out._setup(settings, groups=1, channels=self.embed_dim, kernel=())
        self.register_forward_pre_hook(_no_fast_path)

    def _project(self, index: int, x: Tensor) -> Tensor:
        weights, biases = self._in_weights()
        y: Tensor = getattr(self, INPUTS[index])(x, weights[index], biases[index])
        return y

    def _are_one(self) -> bool:
        """In training: each takes the statistics of the batch, and those are the same for one input."""
        parts = [getattr(self, name) for name in INPUTS]
        first = parts[0].settings
        alike = all(p._learns and p.settings == first and not _has_hooks(p) for p in parts)
        return self._qkv_same_embed_dim and alike

    def _project_all(self, x: Tensor) -> tuple[Tensor, ...]:
        q, *others = (getattr(self, name) for name in INPUTS)
        y: Tensor = q(x, self.in_proj_weight, self.in_proj_bias, others)
        return y.chunk(3, -1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The state of a plain attention has no statistics: this one then forgets its own, and evaluates as that."""
        parts = {f"{prefix}{name}.": getattr(self, name) for name in INPUTS}
        plain = any(prefix + name in state_dict for name in ("in_proj_weight", "q_proj_weight"))
        if plain and not any(key.startswith(tuple(parts)) for key in state_dict):
            for start, part in parts.items():
                part.reset_running_stats()
                if 1 <= args[0].get("version", 0) < self._version:  # written by torch.nn: this is all it has
                    state_dict.update({start + key: buffer.clone() for key, buffer in part.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def _restore_stock_(self) -> None:
        """Become the stock module that evaluates alike. Parameters are new: the old ones may be tied to others."""
        parts: list[Projection] = [self._modules.pop(name) for name in INPUTS]  # type: ignore[misc]
        folded = [p._folded(*p._evaluation_root(), w, b) for p, w, b in zip(parts, *self._in_weights(), strict=True)]
        new = {f"{name}_weight": weight for name, (weight, _) in zip(INPUTS, folded, strict=True)}
        if self._qkv_same_embed_dim:
            new = {"in_proj_weight": torch.cat(list(new.values()))}
        for name, weight in new.items():
            setattr(self, name, nn.Parameter(weight, trains := getattr(self, name).requires_grad))
        had_bias = self.in_proj_bias is not None
        self.in_proj_bias = nn.Parameter(torch.cat([bias for _, bias in folded]), trains)
        stock: Any = self
        out, scales = stock.out_proj, tuple((part.settings.scale, part.settings.scale_eps) for part in parts)
        of_out = getattr(getattr(out, "settings", out), "scale", "none")  # of ours, or of what fold_ made of it
        if {of_out, *dict(scales)} != {"none"}:  # stock attention would read out_proj's weight, and not call it
            stock.__class__, stock.scales = ScaledMultiheadAttention, scales
            return
        stock.__class__ = nn.MultiheadAttention
        out.__dict__["_stock"] = NonDynamicallyQuantizableLinear  # what fold_ turns it back into
        if had_bias:  # without, nn.TransformerEncoderLayer's norms may have none, and its fast path fails on that
            for key in [key for key, hook in self._forward_pre_hooks.items() if hook is _no_fast_path]:
                del self._forward_pre_hooks[key]


class ScaledMultiheadAttention(_SlowPath):
    """What is left of MultiheadAttention for inference where S is not 1: plain weights on scaled rows."""

    scales: tuple[tuple[str, float], ...]  # and their ε, of query, key and value; out_proj scales its own input

    def _project(self, index: int, x: Tensor) -> Tensor:
        weights, biases = self._in_weights()
        scale, eps = self.scales[index]
        if scale != "none":
            center, gain = whitening.sample_scale(x, scale, (-1,), eps=eps)
            x = ((x.to(gain.dtype) - center) * gain).to(x.dtype)
        return F.linear(x, weights[index], biases[index])


def _counting(valid: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Only valid positions count in statistics, where it is known which are."""
    return contextlib.nullcontext() if valid is None else masking.mask(valid)


def _has_hooks(module: nn.Module) -> bool:
    """Whether someone wants to see its calls."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(map(bool, kinds))


def _no_fast_path(module: nn.Module, args: object) -> None:
    """A hook that does nothing: nn.TransformerEncoderLayer reads the weights itself, unless there are hooks inside."""
