"""Language modelling: the next token of plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import Config, LanguageData
from ..data.text import EOS, IGNORE, LanguageText, Stream
from ..models.transformer import build_language_model
from .base import Meter, Task

Batch = dict[str, Tensor]


class Language(Task):
    """Text in blocks of data.length tokens.

    Besides the perplexity per token, evaluation gives bits per byte and the perplexity per word (with a line end as a
    word) where tokens spell the text, which compare models of different vocabularies.
    """

    metric: ClassVar[str] = "perplexity"
    maximise: ClassVar[bool] = False
    unit: ClassVar[str] = "tokens"
    free_dims: ClassVar[tuple[int, ...]] = (0, 1)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data = config.data
        assert isinstance(data, LanguageData)
        self.length = data.length
        self.text = LanguageText(data)
        self.train_set = Stream(self.text.train, data.length, whole=False, limit=data.train_limit)
        self.eval_set = Stream(self.text.valid, data.length, whole=True, limit=data.eval_limit)

    def build(self) -> nn.Module:
        options = {"max_positions": max(1024, self.length), **self.config.model.options}
        return build_language_model(self.config.model.name, self.text.size, **options)

    def collate(self, items: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        """Blocks; the last one of a text may be shorter, and what pads it is no target."""
        tokens, targets = zip(*items, strict=True)
        return {
            "tokens": nn.utils.rnn.pad_sequence(list(tokens), batch_first=True, padding_value=EOS),
            "targets": nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=IGNORE),
        }

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["tokens"])  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self.forward(model, batch).flatten(0, 1), batch["targets"].flatten()
        loss = F.cross_entropy(logits, targets, label_smoothing=self.config.run.label_smoothing, ignore_index=IGNORE)
        return {"loss": loss}

    def meter(self) -> Meter:
        return LanguageMeter(self.text.bytes_per_token(), self.text.bytes_per_word)

    def example(self) -> tuple[Tensor, ...]:
        return (self.train_set[0][0][None],)

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": self.text.text()}


class LanguageMeter(Meter):
    """Sums of -log p, of tokens and of the bytes that they spell."""

    def __init__(self, bytes_per_token: Tensor | None, bytes_per_word: float) -> None:
        self.bytes_per_token, self.bytes_per_word = bytes_per_token, bytes_per_word
        self.nll, self.tokens, self.bytes = 0.0, 0, 0

    def update(self, model: nn.Module, batch: Batch) -> None:
        targets = batch["targets"].flatten()
        logits = model(batch["tokens"]).flatten(0, 1)
        losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
        self.nll += float(losses.sum(dtype=torch.float64))
        seen = targets[targets != IGNORE].cpu()
        self.tokens += len(seen)
        if self.bytes_per_token is not None:
            self.bytes += int(self.bytes_per_token[seen].sum())

    def state(self) -> Any:
        return self.nll, self.tokens, self.bytes

    def result(self, states: list[Any]) -> dict[str, float]:
        nll, tokens, size = (sum(values) for values in zip(*states, strict=True))
        found = {"perplexity": _exp(nll / tokens), "loss": nll / tokens}
        if self.bytes_per_token is not None:
            found["bpb"] = nll / size / math.log(2)
            found["word_perplexity"] = _exp(nll / size * self.bytes_per_word)
        return found


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf  # where a float ends
