"""Text: vocabularies, pairs of sentences for translation, and streams of tokens for language models.

Files are read whole, gzip'd ones (.gz) too, and kept as flat arrays of token numbers.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..config import LanguageData, TranslationData
from ..errors import ConfigError, DataError, MissingExtra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[np.int32]
Pair = tuple[str, str]

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
IGNORE = -100  # what cross-entropy leaves out

_AT_ONCE = 10_000  # lines encoded together: the tokenizer's own objects take a hundred times the memory of the text


# --- files ---


def read(path: Path) -> bytes:
    """The whole of a file that is not empty."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        what = "there is no such file; check data.path and the names in data.train and data.valid"
        raise DataError(path, what if isinstance(error, FileNotFoundError) else f"cannot be read: {error}") from error
    if not content.strip():
        raise DataError(path, "expected text; the file is empty")
    return content


def read_text(path: Path) -> str:
    content = read(path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(path, f"is not UTF-8 ({error.reason}); convert the file to UTF-8", f"line {line}") from error


def lines_of(text: str) -> list[str]:
    """Lines with their ends: at \\n only, where str.splitlines knows a dozen others."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


# --- pairs of sentences ---


def read_pairs(data: TranslationData, names: Sequence[str], limit: int | None = None) -> list[Pair | DataError]:
    """The pairs of all files in order, the first `limit` of them; an error stands for one that cannot be used.

    A file that ends in .tsv, or is the only one, holds both sides, in data.columns; the others come in twos, source
    and target. data.format "tsv" or "lines" says that all are of one kind.
    """
    if data.format not in ("auto", "tsv", "lines"):
        raise ConfigError(f"data.format: expected auto, tsv or lines for translation; got {data.format!r}")
    pairs: list[Pair | DataError] = []
    waiting: Path | None = None
    for name in names:
        path = Path(data.path) / name
        ends = name.removesuffix(".gz").endswith(".tsv") or len(names) == 1
        if waiting is None and (data.format == "tsv" or (data.format == "auto" and ends)):
            pairs += _of_columns(path, data.columns)
        elif waiting is None:
            waiting = path
        else:
            pairs += _of_two(waiting, path)
            waiting = None
    if waiting is not None:
        raise DataError(waiting, "expected source and target files in twos; this one has no target after it")
    return pairs[:limit]


def _of_columns(path: Path, columns: tuple[int, int]) -> Iterator[Pair | DataError]:
    for number, line in enumerate(_raw_lines(path), start=1):
        cells = line.split(b"\t")
        if len(cells) <= max(columns):
            reason = f"expected {max(columns) + 1} columns separated by tabs (data.columns is {columns}); "
            yield DataError(path, f"{reason}got {len(cells)}", f"line {number}")
        else:
            yield _pair(cells[columns[0]], cells[columns[1]], path, path, number)


def _of_two(source: Path, target: Path) -> Iterator[Pair | DataError]:
    left, right = _raw_lines(source), _raw_lines(target)
    if len(left) != len(right):
        raise DataError(target, f"expected a line for each of the {len(left)} of {source}; got {len(right)} lines")
    for number, (a, b) in enumerate(zip(left, right, strict=True), start=1):
        yield _pair(a, b, source, target, number)


def _raw_lines(path: Path) -> list[bytes]:
    return read(path).removesuffix(b"\n").split(b"\n")


def _pair(source: bytes, target: bytes, source_path: Path, target_path: Path, number: int) -> Pair | DataError:
    texts = []
    for raw, path, side in ((source, source_path, "source"), (target, target_path, "target")):
        try:
            text = raw.decode().strip()
        except UnicodeDecodeError as error:
            return DataError(path, f"the {side} is not UTF-8 ({error.reason})", f"line {number}")
        if not text:
            return DataError(path, f"expected a sentence; the {side} is empty", f"line {number}")
        texts.append(text)
    return texts[0], texts[1]


class ParallelText(Dataset[tuple[Tensor, Tensor]]):
    """Pairs as tokens: the source with eos, the target with bos and eos.

    Pairs with a side of more than max_length tokens are left out, and counted in `too_long`.
    """

    def __init__(self, pairs: Sequence[Pair | DataError], vocabulary: Vocabulary, max_length: int | None) -> None:
        good = [pair for pair in pairs if not isinstance(pair, DataError)]
        encoded = zip(*(vocabulary.encode([pair[side] for pair in good]) for side in (0, 1)), strict=True)
        nothing = np.zeros(0, np.int32)
        kept: list[tuple[Tokens, Tokens]] = []
        self.bad: dict[int, DataError] = {}
        self.too_long = 0
        for pair in pairs:
            source, target = (nothing, nothing) if isinstance(pair, DataError) else next(encoded)
            if max_length is not None and max(len(source), len(target)) > max_length:
                self.too_long += 1
                continue
            if isinstance(pair, DataError):
                self.bad[len(kept)] = pair
            kept.append((source, target))
        self._source, self._source_ends = _flat([source for source, _ in kept])
        self._target, self._target_ends = _flat([target for _, target in kept])
        self.lengths = [max(len(source), len(target)) + 1 for source, target in kept]
        for index in self.bad:  # whatever a loader puts in its place fits among the longest
            self.lengths[index] = max(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise self.bad[index]
        source = self._source[self._source_ends[index] : self._source_ends[index + 1]]
        target = self._target[self._target_ends[index] : self._target_ends[index + 1]]
        return _tensor([*source, EOS]), _tensor([BOS, *target, EOS])


def _flat(texts: list[Tokens]) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """All tokens, and where each text begins and ends."""
    return np.concatenate([np.zeros(0, np.int32), *texts]), np.cumsum([0, *map(len, texts)], dtype=np.int64)


def _tensor(tokens: Any) -> Tensor:
    return torch.as_tensor(np.asarray(tokens, np.int64))


# --- vocabularies ---


class Vocabulary:
    """Tokens of a tokenizer, whose first numbers are SPECIALS. The same text makes the same vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = True  # "<eos>" in a text is text
        self.size = 1 + max(tokenizer.get_vocab().values())  # a text that spells a special token leaves a gap

    @classmethod
    def trained(cls, lines: Iterable[str], kind: Literal["bpe", "words"], size: int) -> Vocabulary:
        """Byte-level BPE of at most `size` tokens, or the most frequent words."""
        try:
            import tokenizers
        except ImportError as error:
            raise MissingExtra("tokenizers", "a vocabulary") from error
        from tokenizers import decoders, models, pre_tokenizers, trainers

        least = {"bpe": 256 + len(SPECIALS), "words": 1 + len(SPECIALS)}[kind]
        if size < least:
            raise ConfigError(f"data.vocabulary: expected at least {least} for {kind}; got {size}")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, it warns of every worker of a loader
        common: dict[str, Any] = {"vocab_size": size, "special_tokens": list(SPECIALS), "show_progress": False}
        if kind == "bpe":
            tokenizer = tokenizers.Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            trainer: Any = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
        else:
            tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token=SPECIALS[UNK]))
            tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            trainer = trainers.WordLevelTrainer(**common)
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    def encode(self, lines: Sequence[str]) -> list[Tokens]:
        found: list[Tokens] = []
        for start in range(0, len(lines), _AT_ONCE):
            batch = self.tokenizer.encode_batch_fast(list(lines[start : start + _AT_ONCE]), add_special_tokens=False)
            found += [np.array(one.ids, np.int32) for one in batch]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without specials."""
        return self.tokenizer.decode([token for token in tokens if token >= len(SPECIALS)])

    def bytes_per_token(self) -> Tensor:
        """How many bytes of text each token of a byte-level vocabulary stands for, where each character is a byte."""
        names = [self.tokenizer.id_to_token(number) or "" for number in range(self.size)]
        return torch.tensor([0 if number < len(SPECIALS) else len(name) for number, name in enumerate(names)])

    def text(self) -> str:
        """The tokenizer's file."""
        return self.tokenizer.to_str(pretty=True)


# --- streams of tokens ---


class Stream(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of `length` tokens and the token after each. The first is preceded by eos, so that it is a target, too.

    With `whole` the last block may be shorter, and every token is the target of one position; training leaves it out.
    """

    def __init__(self, tokens: Tokens, length: int, whole: bool, limit: int | None = None) -> None:
        self.tokens = np.concatenate([np.array([EOS], np.int32), tokens])
        self.length = length
        blocks = -(-len(tokens) // length) if whole else len(tokens) // length
        self.blocks = blocks if limit is None else min(blocks, limit)

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.blocks:
            raise IndexError(f"block {index} of {self.blocks}")
        block = _tensor(self.tokens[index * self.length : (index + 1) * self.length + 1])
        return block[:-1], block[1:]


class LanguageText:
    """The training and validation text of a language model as tokens.

    Words end with an eos for every line, as in the Penn Treebank; bpe and bytes spell the text exactly, line ends too,
    so that their likelihood is that of the same bytes.
    """

    def __init__(self, data: LanguageData) -> None:
        self.kind = data.tokens
        train, valid = ([Path(data.path) / name for name in names] for names in (data.train, data.valid))
        self.vocabulary: Vocabulary | None = None
        if self.kind == "bytes":
            self.size = len(SPECIALS) + 256
            contents = [b"".join(map(read, paths)) for paths in (train, valid)]
            self.train, self.valid = map(_of_bytes, contents)
            lines = lines_of(contents[1].decode(errors="replace"))
        else:
            train_lines, lines = (
                [line for path in paths for line in lines_of(read_text(path))] for paths in (train, valid)
            )
            self.vocabulary = Vocabulary.trained(train_lines, self.kind, data.vocabulary)
            self.size = self.vocabulary.size
            self.train, self.valid = self._encode(train_lines), self._encode(lines)
        if len(self.train) < data.length:
            reason = f"expected at least one block of data.length = {data.length} tokens; got {len(self.train)}"
            raise DataError(", ".join(map(str, train)), reason)
        words = sum(len(line.split()) + 1 for line in lines)  # with the end of each line
        self.bytes_per_word = sum(len(line.encode()) for line in lines) / words

    def _encode(self, lines: list[str]) -> Tokens:
        assert self.vocabulary is not None
        parts = self.vocabulary.encode(lines)
        if self.kind == "words":
            end = np.array([EOS], np.int32)
            parts = [part for line in parts for part in (line, end)]
        return np.concatenate(parts)

    def bytes_per_token(self) -> Tensor | None:
        """None for words, which do not spell the text."""
        if self.kind == "bytes":
            return torch.tensor([0] * len(SPECIALS) + [1] * 256)
        return self.vocabulary.bytes_per_token() if self.vocabulary and self.kind == "bpe" else None

    def text(self) -> str:
        """What the vocabulary is, for a file."""
        if self.vocabulary is not None:
            return self.vocabulary.text()
        return json.dumps({"kind": "bytes", "specials": SPECIALS, "first_byte": len(SPECIALS)})


def _of_bytes(content: bytes) -> Tokens:
    tokens: Tokens = np.frombuffer(content, np.uint8).astype(np.int32) + np.int32(len(SPECIALS))
    return tokens
