"""Reading text, vocabularies, and what is said of text that cannot be used."""

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ndpp_recipes.config import LanguageData, TranslationData
from ndpp_recipes.data.text import (
    BOS,
    EOS,
    SPECIALS,
    UNK,
    LanguageText,
    ParallelText,
    Stream,
    Vocabulary,
    lines_of,
    read_pairs,
    read_text,
)
from ndpp_recipes.errors import ConfigError, DataError

LINES = [
    "the cat sat on the mat",
    "der Hund läuft über die Straße",
    "日本語 <eos> 😀 and  two spaces",
    "the the the",
] * 5


@pytest.fixture
def bpe():
    return Vocabulary.trained(LINES, "bpe", 300)


def pairs(folder, *names, **options):
    return read_pairs(TranslationData(path=str(folder), **options), names)


# --- vocabularies ---


def test_bpe_spells_any_text_exactly(bpe):
    texts = [*LINES, "never seen: ‰ \t \x00 ÿ", " leading and trailing ", "<pad><bos><eos><unk>", "a\nb\r\n"]
    for text, tokens in zip(texts, bpe.encode(texts), strict=True):
        assert bpe.decode(tokens.tolist()) == text
        assert tokens.min() >= len(SPECIALS)  # specials in a text are text
        assert int(bpe.bytes_per_token()[tokens].sum()) == len(text.encode())
    assert bpe.size == 300


def test_bpe_is_the_same_in_another_process_and_order_of_reading(bpe):
    program = (
        "import sys, json; from ndpp_recipes.data.text import Vocabulary;"
        "sys.stdout.write(Vocabulary.trained(iter(json.loads(sys.argv[1])), 'bpe', 300).text())"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, json.dumps(LINES)], capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert other.stdout == bpe.text()
    assert Vocabulary.trained(list(reversed(LINES)), "bpe", 300).text() == bpe.text()


def test_merges_are_those_of_frequent_pairs():
    """Byte-pair encoding by hand: 'ab' is the most frequent pair, 'abc' the next."""
    vocabulary = Vocabulary.trained(["abc abc ab"], "bpe", 260 + 2)
    names = [vocabulary.tokenizer.id_to_token(number) for number in (260, 261)]
    assert names[0] == "ab"
    assert names[1] in ("abc", "Ġab")


def test_words_are_ranked_by_frequency_and_others_unknown():
    vocabulary = Vocabulary.trained(["b b b a a c <unk>"], "words", 6)
    encoded = vocabulary.encode(["a b zzz <unk> c"])[0].tolist()
    assert encoded == [5, 4, UNK, UNK, UNK]  # room for two words


@pytest.mark.parametrize(("kind", "least"), [("bpe", 260), ("words", 5)])
def test_vocabulary_too_small(kind, least):
    with pytest.raises(ConfigError, match=f"data.vocabulary: expected at least {least} for {kind}; got {least - 1}"):
        Vocabulary.trained(LINES, kind, least - 1)


def test_long_texts_are_encoded_in_parts(bpe, monkeypatch):
    whole = bpe.encode(LINES)
    monkeypatch.setattr("ndpp_recipes.data.text._AT_ONCE", 3)
    for a, b in zip(whole, bpe.encode(LINES), strict=True):
        np.testing.assert_array_equal(a, b)


# --- pairs ---


def test_two_files_columns_and_gzip_are_one_corpus(tmp_path):
    (tmp_path / "a.de").write_text("ein\nzwei\r\n", encoding="utf-8")
    (tmp_path / "a.en").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "b.tsv").write_text("drei\tthree\tsource 1\n", encoding="utf-8")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"vier\tfour\n"))
    expected = [("ein", "one"), ("zwei", "two"), ("drei", "three"), ("vier", "four")]
    assert pairs(tmp_path, "a.de", "a.en", "b.tsv", "c.tsv.gz") == expected
    assert read_pairs(TranslationData(path=str(tmp_path)), ("a.de", "a.en", "b.tsv"), 3) == expected[:3]


def test_the_only_file_has_columns_whatever_its_name(tmp_path):
    (tmp_path / "deu.txt").write_text("one\tein\tCC-BY\ntwo\tzwei\tCC-BY\n")
    assert pairs(tmp_path, "deu.txt", columns=(1, 0)) == [("ein", "one"), ("zwei", "two")]
    assert pairs(tmp_path, "deu.txt", "deu.txt", format="tsv")[2:] == [("one", "ein"), ("two", "zwei")]
    assert pairs(tmp_path, "deu.txt", "deu.txt")[0] == ("one\tein\tCC-BY", "one\tein\tCC-BY")


def test_only_newlines_end_lines(tmp_path):
    (tmp_path / "a.de").write_text("ein\u2028noch ein\x0bwort\nzwei", encoding="utf-8")
    (tmp_path / "a.en").write_text("one\ntwo", encoding="utf-8")
    assert [pair[1] for pair in pairs(tmp_path, "a.de", "a.en")] == ["one", "two"]
    assert lines_of("a\u2028b\n\nc") == ["a\u2028b\n", "\n", "c"]
    assert lines_of("a\n") == ["a\n"]


def test_unusable_files(tmp_path):
    (tmp_path / "a.de").write_text("ein\nzwei\n")
    (tmp_path / "a.en").write_text("one\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bad.gz").write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.en: expected a line for each of the 2 of .*a\.de; got 1 lines"):
        pairs(tmp_path, "a.de", "a.en")
    with pytest.raises(DataError, match=r"b\.en: there is no such file; check data\.path"):
        pairs(tmp_path, "a.de", "b.en")
    with pytest.raises(DataError, match=r"empty: expected text; the file is empty"):
        pairs(tmp_path, "a.de", "empty")
    with pytest.raises(DataError, match=r"bad\.gz: cannot be read"):
        pairs(tmp_path, "bad.gz")
    with pytest.raises(DataError, match=r"a\.de: expected source and target files in twos"):
        pairs(tmp_path, "a.en", "a.en", "a.de")
    with pytest.raises(ConfigError, match=r"data.format: expected auto, tsv or lines .* got 'coco'"):
        pairs(tmp_path, "a.de", format="coco")
    with pytest.raises(DataError, match="cannot be read"):
        pairs(tmp_path.parent, tmp_path.name)


@pytest.fixture
def damaged(tmp_path) -> list:
    rows = [b"ein\tone", b"zwei", b"drei\t\xff\xfe", b"\tfour", b"f\xc3\xbcnf\tfive"]
    (tmp_path / "x.tsv").write_bytes(b"\n".join(rows) + b"\n")
    return pairs(tmp_path, "x.tsv")


def test_bad_records_are_named(damaged):
    assert [damaged[0], damaged[4]] == [("ein", "one"), ("fünf", "five")]
    expected = {
        1: "line 2]: expected 2 columns separated by tabs (data.columns is (0, 1)); got 1",
        2: "line 3]: the target is not UTF-8 (invalid start byte)",
        3: "line 4]: expected a sentence; the source is empty",
    }
    for index, message in expected.items():
        assert isinstance(damaged[index], DataError)
        assert message in str(damaged[index])
        assert Path(damaged[index].path).name == "x.tsv"


def test_bad_records_raise_when_asked_for(damaged, bpe):
    data = ParallelText(damaged, bpe, max_length=50)
    assert len(data) == 5
    assert set(data.bad) == {1, 2, 3}
    assert bpe.decode(data[4][0].tolist()) == "fünf"
    with pytest.raises(DataError, match=r"x\.tsv \[line 3\]: the target is not UTF-8"):
        data[2]
    again = pickle.loads(pickle.dumps(data))  # as for a worker
    torch.testing.assert_close(again[4], data[4])
    assert {data.lengths[i] for i in data.bad} == {max(data.lengths)}


def test_items_and_lengths(bpe):
    data = ParallelText([("the cat", "the"), ("the", "the cat sat on the mat" * 3)], bpe, None)
    for index, (source, target) in enumerate([("the cat", "the"), ("the", "the cat sat on the mat" * 3)]):
        a, b = (part.tolist() for part in bpe.encode([source, target]))
        assert data[index][0].tolist() == [*a, EOS]
        assert data[index][1].tolist() == [BOS, *b, EOS]
        assert data.lengths[index] == max(len(a), len(b)) + 1


def test_long_pairs_are_left_out_and_counted(bpe):
    sides = [("the", "the"), ("the", "x" * 11), ("y" * 11, "the"), ("z" * 10, "the")]
    data = ParallelText(sides, bpe, 10)
    assert data.too_long == 2
    assert [bpe.decode(data[i][0].tolist()) for i in range(len(data))] == ["the", "z" * 10]


# --- streams ---


@pytest.mark.parametrize("count", [1, 4, 5, 9, 12])
def test_every_token_is_a_target_once(count):
    tokens = np.arange(10, 10 + count, dtype=np.int32)
    stream = Stream(tokens, 4, whole=True)
    blocks = [stream[i] for i in range(len(stream))]
    assert torch.cat([target for _, target in blocks]).tolist() == tokens.tolist()
    assert torch.cat([inputs for inputs, _ in blocks]).tolist() == [EOS, *tokens[:-1].tolist()]
    assert len(Stream(tokens, 4, whole=False)) == count // 4
    assert len(Stream(tokens, 4, whole=True, limit=2)) == min(2, -(-count // 4))
    with pytest.raises(IndexError):
        stream[len(stream)]


def text_of(folder, train, valid, **options):
    (folder / "train.txt").write_text(train, encoding="utf-8")
    (folder / "valid.txt").write_text(valid, encoding="utf-8")
    return LanguageText(LanguageData(path=str(folder), length=4, **options))


def test_words_end_with_eos_for_every_line(tmp_path):
    text = text_of(tmp_path, " the cat \n the <unk> \n", " the dog\n\n", tokens="words", vocabulary=100)
    names = [text.vocabulary.tokenizer.id_to_token(int(number)) for number in text.train]
    assert names == ["the", "cat", "<eos>", "the", "<unk>", "<eos>"]
    assert [text.vocabulary.tokenizer.id_to_token(int(n)) for n in text.valid] == ["the", "<unk>", "<eos>", "<eos>"]
    assert text.bytes_per_token() is None


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_bpe_and_bytes_spell_the_text(tmp_path, kind):
    train, valid = "\n".join(LINES), "ein Straße\n\n  two \n"
    text = text_of(tmp_path, train, valid, tokens=kind, vocabulary=280)
    if kind == "bytes":
        assert bytes((text.valid - len(SPECIALS)).astype(np.uint8)).decode() == valid
        assert text.size == 260
    else:
        assert text.vocabulary.decode(text.valid.tolist()) == valid
        assert text.size == 280
    assert int(text.bytes_per_token()[text.valid].sum()) == len(valid.encode())
    assert text.bytes_per_word == pytest.approx(len(valid.encode()) / (2 + 0 + 1 + 3))
    assert text.train.dtype == np.int32


def test_files_are_joined(tmp_path):
    (tmp_path / "a").write_text("one two")
    (tmp_path / "b").write_text("three\n")
    data = LanguageData(path=str(tmp_path), train=("a", "b"), valid=("b",), tokens="words", vocabulary=9, length=2)
    names = [LanguageText(data).vocabulary.tokenizer.id_to_token(int(n)) for n in LanguageText(data).train]
    assert names == ["one", "two", "<eos>", "three", "<eos>"]


def test_unusable_language_text(tmp_path):
    with pytest.raises(DataError, match=r"train\.txt: expected at least one block of data\.length = 4 tokens; got 3"):
        text_of(tmp_path, "a b\n", "a\n", tokens="words")
    (tmp_path / "latin").write_bytes("ok\ngut\nStra\xdfe\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin \[line 3\]: is not UTF-8"):
        read_text(tmp_path / "latin")
    with pytest.raises(DataError, match=r"missing\.txt: there is no such file"):
        LanguageText(LanguageData(path=str(tmp_path), valid=("missing.txt",)))


@pytest.mark.parametrize("tokens", ["words", "bpe"])
def test_a_text_that_spells_special_tokens_stays_within_the_vocabulary(tmp_path: Path, tokens: str) -> None:
    """The Penn Treebank has <unk> in its text."""
    text = "the <unk> sat on <eos> the <pad> mat <unk>\n" * 30
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text(text + "unseen words" * (name == "valid.txt"))
    read = LanguageText(LanguageData(path=str(tmp_path), tokens=tokens, vocabulary=300, length=8))  # type: ignore[arg-type]
    for part in (read.train, read.valid):
        assert int(part.min()) >= 0
        assert int(part.max()) < read.size
