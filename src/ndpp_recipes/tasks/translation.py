"""Translation: sentences of one language from those of another."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import ndpp

from ..config import Config, TranslationData
from ..data.text import BOS, EOS, PAD, ParallelText, Vocabulary, read_pairs
from ..errors import ConfigError, DataError, MissingExtra
from ..models.transformer import Translator, build_translator, generate
from .base import Meter, Task

Batch = dict[str, Tensor]

log = logging.getLogger(__name__)

_DECODING = ("beam", "length_penalty")  # options that are not of the network


class Translation(Task):
    """Pairs of sentences in one vocabulary, batched by length.

    model.options may have `beam` and `length_penalty`, with which evaluation decodes (greedily by default).
    """

    metric: ClassVar[str] = "bleu"
    unit: ClassVar[str] = "tokens"
    free_dims: ClassVar[tuple[int, ...]] = (0, 1)

    train_set: ParallelText
    eval_set: ParallelText

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data = config.data
        assert isinstance(data, TranslationData)
        self.data = data
        self.decoding = {key: config.model.options[key] for key in _DECODING if key in config.model.options}
        if self.decoding.get("beam", 1) < 1:
            raise ConfigError(f"model.options.beam: expected 1 (greedy) or more; got {self.decoding['beam']}")
        train = read_pairs(data, data.train, data.train_limit)
        valid = read_pairs(data, data.valid, data.eval_limit)
        texts = (text for pair in train if not isinstance(pair, DataError) for text in pair)
        self.vocabulary = Vocabulary.trained(texts, "bpe", data.vocabulary)
        self.train_set = ParallelText(train, self.vocabulary, data.max_length)
        self.eval_set = ParallelText(valid, self.vocabulary, None)
        if self.train_set.too_long:
            log.warning(
                "%d of %d pairs have more than data.max_length = %d tokens, and are left out",
                self.train_set.too_long,
                len(train),
                data.max_length,
            )
        for what, pairs in (("train on", self.train_set), ("evaluate", self.eval_set)):
            if len(pairs) == len(pairs.bad):
                reason = f"{len(pairs.bad)} cannot be used and {pairs.too_long} are too long"
                raise DataError(data.path, f"expected pairs of sentences to {what}; {reason}, and no other is there")

    def build(self) -> nn.Module:
        options = {key: value for key, value in self.config.model.options.items() if key not in _DECODING}
        return build_translator(self.config.model.name, self.vocabulary.size, PAD, **options)

    def collate(self, items: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        source, target = (pad_sequence(list(side), True, PAD) for side in zip(*items, strict=True))
        return {"source": source, "target": target}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["source"], batch["target"][:, :-1])  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, targets = self.forward(model, batch).flatten(0, 1), batch["target"][:, 1:].flatten()
        smoothing = self.config.run.label_smoothing
        loss = F.cross_entropy(logits, targets, ignore_index=PAD, label_smoothing=smoothing)
        nll = F.cross_entropy(logits.detach(), targets, ignore_index=PAD) if smoothing else loss.detach()
        return {"loss": loss, "nll": nll}

    def meter(self) -> Meter:
        return TranslationMeter(self.vocabulary, **self.decoding)

    def example(self) -> tuple[Tensor, ...]:
        """A source and the target so far, of which the model gives the logits of each next token."""
        first = next(index for index in range(len(self.train_set)) if index not in self.train_set.bad)
        source, target = self.train_set[first]
        return source[None], target[None, :-1]

    def batches(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """Pairs of about one length: at most `size` of them, and data.max_tokens tokens with padding.

        The lengths of every batch are those of every other epoch; which pairs of a length meet, and the order of
        batches, are drawn.
        """
        shuffled = torch.randperm(len(self.train_set), generator=generator).tolist()
        found = self._by_length(self.train_set, shuffled, size)
        return [found[i] for i in torch.randperm(len(found), generator=generator).tolist()]

    def eval_batches(self, size: int) -> list[list[int]]:
        return self._by_length(self.eval_set, list(range(len(self.eval_set))), size)

    def _by_length(self, pairs: ParallelText, order: list[int], size: int) -> list[list[int]]:
        found: list[list[int]] = []
        for index in sorted(order, key=pairs.lengths.__getitem__):
            longest = pairs.lengths[index]  # so far
            if not found or len(found[-1]) >= min(size, max(1, self.data.max_tokens // longest)):
                found.append([])
            found[-1].append(index)
        return found

    def count(self, batch: Batch) -> int:
        return int((batch["target"][:, 1:] != PAD).sum())

    def files(self) -> dict[str, str]:
        return {"tokenizer.json": self.vocabulary.text()}


class TranslationMeter(Meter):
    """Decodes, and compares with the reference by sacreBLEU; the loss is that of the reference."""

    def __init__(self, vocabulary: Vocabulary, beam: int = 1, length_penalty: float = 1.0) -> None:
        self.vocabulary, self.beam, self.length_penalty = vocabulary, beam, length_penalty
        self.decoder: Translator | None = None
        self.nll, self.tokens = 0.0, 0
        self.hypotheses: list[str] = []
        self.references: list[str] = []

    def update(self, model: nn.Module, batch: Batch) -> None:
        if self.decoder is None:
            self.decoder = for_decoding(model)
        source, target = batch["source"], batch["target"]
        logits = self.decoder(source, target[:, :-1]).flatten(0, 1).float()
        losses = F.cross_entropy(logits, target[:, 1:].flatten(), ignore_index=PAD, reduction="none")
        self.nll += float(losses.sum(dtype=torch.float64))
        self.tokens += int((target[:, 1:] != PAD).sum())
        decoded = generate(self.decoder, source, bos=BOS, eos=EOS, beam=self.beam, length_penalty=self.length_penalty)
        self.hypotheses += map(self.vocabulary.decode, decoded)
        self.references += map(self.vocabulary.decode, target.tolist())

    def state(self) -> Any:
        return self.nll, self.tokens, self.hypotheses, self.references

    def result(self, states: list[Any]) -> dict[str, float]:
        nll, tokens = (sum(values) for values in list(zip(*states, strict=True))[:2])
        hypotheses, references = ([text for state in states for text in state[side]] for side in (2, 3))
        loss = nll / tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf  # where a float ends
        return {"bleu": bleu(hypotheses, references), "loss": loss, "ppl": perplexity}


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """Of a corpus, in percent, with sacreBLEU's tokenisation 13a."""
    try:
        import sacrebleu
    except ImportError as error:
        raise MissingExtra("sacrebleu", "evaluating a translation") from error
    return float(sacrebleu.corpus_bleu(hypotheses, [references], tokenize="13a").score)


def for_decoding(model: nn.Module) -> Translator:
    """A copy in stock layers: decoding calls every layer once a token, and would fold D into its weight each time."""
    plain: nn.Module = getattr(model, "_orig_mod", model)  # compiled for sentences, not for single tokens
    assert isinstance(plain, Translator)
    if hasattr(plain, "set_requires_gradient_sync"):  # sharded: no copy has all weights, and each call gathers them
        from torch.distributed.fsdp import register_fsdp_forward_method

        for method in {"encode", "step"} - vars(plain).keys():
            register_fsdp_forward_method(plain, method)
        return plain
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ndpp.fold_: nothing to fold")
        folded = ndpp.fold_(copy.deepcopy(plain))
    assert isinstance(folded, Translator)
    return folded
