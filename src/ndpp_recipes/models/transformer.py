"""Transformers of stock layers: an encoder-decoder for translation and a decoder for language, with decoding."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ndpp

from ..errors import ConfigError

# Keys and values that each attention has seen so far, for decoding one token after another.
Cache = dict[nn.Module, tuple[Tensor, Tensor]]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}


@dataclass(frozen=True)
class Shape:
    """The size of a Transformer and its variants.

    pre_norm normalises the input of each part of a layer and the output of the stack; post-norm, as first published,
    the sum after each part, which needs warm-up. max_positions is for learned positions; the others have no limit.
    """

    dim: int
    layers: int
    heads: int
    hidden: int
    dropout: float = 0.1
    attention_dropout: float = 0.0
    pre_norm: bool = True
    tied: bool = True
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: int = 1024
    activation: Literal["relu", "gelu"] = "relu"
    init: Literal["fairseq", "gpt2"] = "fairseq"

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ConfigError(f"dim must be a multiple of twice the heads; got dim {self.dim}, heads {self.heads}")
        choices = {"positions": ("sinusoidal", "learned"), "activation": ("relu", "gelu"), "init": ("fairseq", "gpt2")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: expected {' or '.join(known)}; got {getattr(self, name)!r}")


_GPT: dict[str, Any] = {"attention_dropout": 0.1, "positions": "learned", "activation": "gelu", "init": "gpt2"}

TRANSLATORS = {  # the first is transformer_iwslt_de_en of fairseq
    "transformer-iwslt": Shape(512, 6, 4, 1024, dropout=0.3),
    "transformer-tiny": Shape(64, 2, 2, 128),
}
LANGUAGE_MODELS = {
    "gpt-small": Shape(768, 12, 12, 3072, **_GPT),
    "gpt-mini": Shape(384, 6, 6, 1536, **_GPT),
    "gpt-tiny": Shape(64, 2, 2, 256, **_GPT),
    "transformer-lm": Shape(512, 6, 8, 2048),  # of fairseq
}


def build_translator(name: str, vocabulary: int, pad: int, **options: Any) -> Translator:
    """One of TRANSLATORS for so many tokens, of which `pad` is padding; options change its Shape."""
    return Translator(_shape(name, TRANSLATORS, options), vocabulary, pad)


def build_language_model(name: str, vocabulary: int, **options: Any) -> LanguageModel:
    """One of LANGUAGE_MODELS for so many tokens; options change its Shape."""
    return LanguageModel(_shape(name, LANGUAGE_MODELS, options), vocabulary)


def _shape(name: str, known: dict[str, Shape], options: dict[str, Any]) -> Shape:
    if name not in known:
        raise ConfigError(f"model.name: expected one of {', '.join(known)}; got {name!r}")
    fields = [field.name for field in dataclasses.fields(Shape)]
    for option in options:
        if option not in fields:
            raise ConfigError(f"model.options.{option}: {name} has no such option; expected one of {', '.join(fields)}")
    return dataclasses.replace(known[name], **options)


class Attention(nn.Module):
    """Multi-head attention with four layers of its own, to itself or to the memory of an encoder."""

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = shape.heads, shape.attention_dropout, causal
        self.query = nn.Linear(shape.dim, shape.dim)
        self.key = nn.Linear(shape.dim, shape.dim)
        self.value = nn.Linear(shape.dim, shape.dim)
        self.output = nn.Linear(shape.dim, shape.dim)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, valid: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """`valid` (batch, time) says which of the keys are data; with a cache, x is what comes after all it holds."""
        query = self._split(self.query(x))
        key, value = self._keys_values(x, memory, valid, cache)
        new, total = query.shape[2], key.shape[2]
        mask = None if valid is None else valid[:, None, None]
        if self.causal and total > new:
            mask = torch.ones(new, total, dtype=torch.bool, device=x.device).tril(total - new)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=self.causal and mask is None)
        return self.output(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _keys_values(
        self, x: Tensor, memory: Tensor | None, valid: Tensor | None, cache: Cache | None
    ) -> tuple[Tensor, Tensor]:
        if memory is not None and cache is not None and self in cache:
            return cache[self]
        if memory is None:
            key, value = self._split(self.key(x)), self._split(self.value(x))
            if cache is not None and self in cache:
                key, value = (torch.cat(pair, dim=2) for pair in zip(cache[self], (key, value), strict=True))
        else:
            with ndpp.mask(valid):  # the memory has padding of its own
                key, value = self._split(self.key(memory)), self._split(self.value(memory))
        if cache is not None:
            cache[self] = key, value
        return key, value

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Layer(nn.Module):
    """Self-attention, attention to a memory where there is one, and two linear layers, each added to its input."""

    def __init__(self, shape: Shape, causal: bool, cross: bool) -> None:
        super().__init__()
        self.pre_norm = shape.pre_norm
        parts: dict[str, nn.Module] = {"self_attention": Attention(shape, causal)}
        if cross:
            parts["cross_attention"] = Attention(shape, causal=False)
        parts["feed_forward"] = nn.Sequential(
            nn.Linear(shape.dim, shape.hidden),
            _ACTIVATIONS[shape.activation](),
            nn.Linear(shape.hidden, shape.dim),
        )
        for name, part in parts.items():
            pair = [(f"{name}_norm", nn.LayerNorm(shape.dim)), (name, part)]
            # In the order of computation, by which conversion tells which layer a norm is followed by.
            for key, module in pair if shape.pre_norm else reversed(pair):
                self.add_module(key, module)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x: Tensor, memory: Tensor | None = None, valid: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        keys = valid if memory is None else None  # causal attention never looks at what pads the end
        x = self._add("self_attention", x, None, keys, cache)
        if memory is not None:
            x = self._add("cross_attention", x, memory, valid, cache)
        return self._add("feed_forward", x)

    def _add(self, name: str, x: Tensor, *context: Any) -> Tensor:
        part, norm = self.get_submodule(name), self.get_submodule(f"{name}_norm")
        y = self.dropout(part(norm(x) if self.pre_norm else x, *context))
        return x + y if self.pre_norm else norm(x + y)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Layers, one after the other."""

    def __init__(self, shape: Shape, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape, causal, cross) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.dim) if shape.pre_norm else nn.Identity()

    def forward(
        self, x: Tensor, memory: Tensor | None = None, valid: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory, valid, cache)
        return self.norm(x)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Tokens and their positions as vectors."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.dim)
        self.places = nn.Embedding(shape.max_positions, shape.dim) if shape.positions == "learned" else None
        self.dropout = nn.Dropout(shape.dropout)
        self.scale = math.sqrt(shape.dim) if shape.init == "fairseq" else 1.0

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        x = self.tokens(tokens) * self.scale
        return self.dropout(x + self._positions(start, start + tokens.shape[1], x))  # type: ignore[no-any-return]

    def _positions(self, start: int, end: int, like: Tensor) -> Tensor:
        positions = torch.arange(start, end, device=like.device)
        if self.places is not None:
            if end > self.places.num_embeddings:
                raise ConfigError(
                    f"a text of {end} tokens came, and there are learned positions for {self.places.num_embeddings}; "
                    "raise model.options.max_positions, or shorten texts (data.length, data.max_length)"
                )
            return self.places(positions)  # type: ignore[no-any-return]
        half = like.shape[-1] // 2
        rates = torch.exp(torch.arange(half, device=like.device) * (-math.log(10_000.0) / half))
        angles = positions[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


class Translator(nn.Module):
    """An encoder and a decoder, which share one embedding."""

    def __init__(self, shape: Shape, vocabulary: int, pad: int) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = Embedding(shape, vocabulary)
        self.encoder = Stack(shape)
        self.decoder = Stack(shape, causal=True, cross=True)
        self.output = nn.Linear(shape.dim, vocabulary, bias=False)
        initialise_(self, shape)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) of the token after each of the target's, right-padded as the source is."""
        memory, valid = self.encode(source)
        with ndpp.mask(target != self.pad):
            return self._decoded(target, memory, valid, None)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The memory, and which of it is no padding."""
        valid = source != self.pad
        with ndpp.mask(valid):
            return self.encoder(self.embedding(source), valid=valid), valid

    def step(self, token: Tensor, memory: Tensor, valid: Tensor, cache: Cache) -> Tensor:
        """Logits (batch, vocabulary) after one more token (batch,) of a target whose others are in the cache."""
        with ndpp.mask(None):
            return self._decoded(token[:, None], memory, valid, cache)[:, 0]

    def _decoded(self, target: Tensor, memory: Tensor, valid: Tensor, cache: Cache | None) -> Tensor:
        x = self.embedding(target, cached_length(cache))
        return self.output(self.decoder(x, memory, valid, cache))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """A decoder alone."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape, vocabulary)
        self.decoder = Stack(shape, causal=True)
        self.output = nn.Linear(shape.dim, vocabulary, bias=False)
        initialise_(self, shape)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits (batch, time, vocabulary) of the token after each; a cache holds the tokens before them."""
        x = self.embedding(tokens, cached_length(cache))
        return self.output(self.decoder(x, cache=cache))  # type: ignore[no-any-return]


def cached_length(cache: Cache | None) -> int:
    """How many tokens a cache holds: the first to enter it is the self-attention of the first layer."""
    return next(iter(cache.values()))[0].shape[2] if cache else 0


@torch.no_grad()
def initialise_(model: Translator | LanguageModel, shape: Shape) -> None:
    """As fairseq or GPT-2 do, then tie the output to the embedding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02 if shape.init == "gpt2" else shape.dim**-0.5)
        elif isinstance(module, nn.Linear):
            if shape.init == "gpt2":
                ends_branch = name.endswith(("attention.output", "feed_forward.2"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * shape.layers) if ends_branch else 0.02)
            elif module is model.output:
                nn.init.normal_(module.weight, std=shape.dim**-0.5)
            else:
                joint = name.endswith(("query", "key", "value"))  # fairseq draws them as one matrix
                nn.init.xavier_uniform_(module.weight, gain=0.5**0.5 if joint else 1.0)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if shape.tied:
        model.output.weight = model.embedding.tokens.weight


@torch.no_grad()
def generate(
    model: Translator, source: Tensor, *, bos: int, eos: int, beam: int = 1, length_penalty: float = 1.0
) -> list[list[int]]:
    """The best translation of each sentence that a beam search finds, without bos and eos; a beam of 1 is greedy.

    Hypotheses are ranked by log p / length^length_penalty, eos counted. A sentence is done when `beam` of them have
    ended, and ends at its limit.
    """
    memory, valid = (t.repeat_interleave(beam, dim=0) for t in model.encode(source))
    limits = length_limits(source != model.pad)
    search = _Search(len(source), beam, bos, eos, int(limits.max()), source.device)
    cache: Cache = {}
    for step in range(int(limits.max()) + 1):
        log_p = model.step(search.tokens[:, -1], memory, valid, cache).float().log_softmax(dim=1)
        log_p[:, [model.pad, bos]] = -math.inf
        log_p = log_p.view(len(source), beam, -1)
        others = torch.arange(log_p.shape[2], device=source.device) != eos
        log_p.masked_fill_((step >= limits)[:, None, None] & others, -math.inf)
        rows = search.advance(log_p, length_penalty)
        if bool((search.ended >= beam).all()):
            break
        for attention, (key, value) in cache.items():
            if isinstance(attention, Attention) and attention.causal:  # a memory is the same for the whole beam
                cache[attention] = key[rows], value[rows]
    return search.results()


def length_limits(valid: Tensor) -> Tensor:
    """The most tokens a translation may have: 1.2 times those of its source, and 10."""
    return valid.sum(1) * 12 // 10 + 10


class _Search:
    """Beams of several sentences, and the best that has ended of each."""

    def __init__(self, count: int, beam: int, bos: int, eos: int, limit: int, device: torch.device) -> None:
        self.beam, self.eos = beam, eos
        self.tokens = torch.full((count * beam, 1), bos, device=device)
        self.scores = torch.full((count, beam), -math.inf, device=device)
        self.scores[:, 0] = 0.0  # all beams begin alike: one of them counts
        self.ended = torch.zeros(count, dtype=torch.long, device=device)
        self.best = torch.full((count, limit), eos, device=device)
        self.best_score = torch.full((count,), -math.inf, device=device)

    def advance(self, log_p: Tensor, penalty: float) -> Tensor:
        """Take log p (count, beam, vocabulary) of the next token; the rows that the beams go on from."""
        count, beam, size = log_p.shape
        scores, index = (self.scores[..., None] + log_p).flatten(1).topk(min(2 * beam, beam * size))
        first = torch.arange(count, device=index.device)[:, None] * beam
        rows, tokens = first + index // size, index % size
        ends = tokens == self.eos
        self._keep_ended(scores[:, :beam], rows[:, :beam], ends[:, :beam], penalty)
        on = ends.int().argsort(dim=1, stable=True)[:, :beam]  # each beam ends once, so enough others are left
        self.scores = scores.masked_fill(ends, -math.inf).gather(1, on)
        chosen = rows.gather(1, on).flatten()
        self.tokens = torch.cat([self.tokens[chosen], tokens.gather(1, on).reshape(-1, 1)], dim=1)
        return chosen

    def _keep_ended(self, scores: Tensor, rows: Tensor, ends: Tensor, penalty: float) -> None:
        length = self.tokens.shape[1]  # bos is not counted, and eos is
        ends = ends & scores.isfinite() & (self.ended < self.beam)[:, None]
        score, which = (scores / length**penalty).masked_fill(~ends, -math.inf).max(dim=1, keepdim=True)
        better = score[:, 0] > self.best_score
        self.best_score = torch.where(better, score[:, 0], self.best_score)
        found = self.tokens[rows.gather(1, which)[:, 0], 1:]
        self.best[:, : length - 1] = torch.where(better[:, None], found, self.best[:, : length - 1])
        self.ended = self.ended + ends.sum(1)

    def results(self) -> list[list[int]]:
        return [row[: row.index(self.eos)] if self.eos in row else row for row in self.best.tolist()]
