"""Language models: perplexity, bits per byte, and learning."""

import math

import pytest
import torch

import ndpp
from ndpp_recipes.config import Config, LanguageData, ModelConfig, RunConfig
from ndpp_recipes.data.text import EOS, IGNORE
from ndpp_recipes.errors import ConfigError
from ndpp_recipes.tasks import make_task

TEXT = "the quick brown fox jumps over the lazy dog\nand the dog sleeps on\n" * 6
VALID = "the fox sleeps\n\nover the größe dog and so on, and on"


def task_for(folder, tokens="bpe", model="gpt-tiny", options=None, length=16, smoothing=0.0, **data):
    (folder / "train.txt").write_text(TEXT, encoding="utf-8")
    (folder / "valid.txt").write_text(VALID, encoding="utf-8")
    return make_task(
        Config(
            recipe="test",
            task="language",
            model=ModelConfig(name=model, options={"dropout": 0.0, "attention_dropout": 0.0, **(options or {})}),
            data=LanguageData(path=str(folder), tokens=tokens, vocabulary=280, length=length, **data),
            run=RunConfig(label_smoothing=smoothing),
        )
    )


def evaluated(task, model, size=2, ranks=1):
    meters = [task.meter() for _ in range(ranks)]
    model.eval()
    with torch.no_grad():
        for number, indices in enumerate(task.eval_batches(size)):
            meters[number % ranks].update(model, task.collate([task.eval_set[i] for i in indices]))
    return meters[0].result([meter.state() for meter in meters])


@pytest.mark.parametrize("tokens", ["bpe", "words", "bytes"])
def test_perplexity_token_by_token(tmp_path, tokens):
    """Every token of the text, from the tokens before it in its block."""
    task = task_for(tmp_path, tokens, length=7)
    torch.manual_seed(0)
    model = task.build().eval()
    stream = [EOS, *task.text.valid.tolist()]
    nll = 0.0
    with torch.no_grad():
        for t in range(1, len(stream)):
            start = (t - 1) // 7 * 7
            log_p = model(torch.tensor([stream[start:t]]))[0, -1].double().log_softmax(dim=0)
            nll -= log_p[stream[t]].item()
    found = evaluated(task, model, ranks=2)
    count = len(stream) - 1
    assert count % 7  # the last block is a short one
    assert found["loss"] == pytest.approx(nll / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)
    if tokens == "words":
        assert set(found) == {"perplexity", "loss"}
        return
    size, words = len(VALID.encode()), len(VALID.split()) + len(VALID.split("\n"))
    assert found["bpb"] == pytest.approx(nll / size / math.log(2), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nll / words), rel=1e-4)


def test_uniform_predictions_give_the_size_of_the_vocabulary(tmp_path):
    task = task_for(tmp_path, "bytes")
    model = task.build()
    torch.nn.init.zeros_(model.output.weight)
    found = evaluated(task, model)
    assert found["perplexity"] == pytest.approx(260, rel=1e-5)
    assert found["bpb"] == pytest.approx(math.log2(260), rel=1e-5)


def test_no_finite_perplexity(tmp_path):
    task = task_for(tmp_path)
    found = task.meter().result([(1e6, 10, 30)])
    assert found["perplexity"] == math.inf
    assert found["loss"] == 1e5


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_leaves_padding_out(tmp_path, smoothing):
    task = task_for(tmp_path, length=7, smoothing=smoothing)
    model = task.build().eval()
    last = len(task.eval_set) - 1
    batch = task.collate([task.eval_set[0], task.eval_set[last]])
    short = len(task.eval_set[last][0])
    assert short < 7
    assert (batch["targets"] == IGNORE).sum() == 7 - short
    assert task.count(batch) == 7 + short
    parts = [task.loss(model, task.collate([task.eval_set[i]]))["loss"].item() for i in (0, last)]
    expected = (7 * parts[0] + short * parts[1]) / (7 + short)
    assert task.loss(model, batch)["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_training_has_whole_blocks_of_the_text(tmp_path):
    task = task_for(tmp_path, "words", length=5)
    count = len(TEXT.split()) + TEXT.count("\n")
    assert len(task.train_set) == count // 5
    seen = sorted(i for batch in task.batches(2, torch.Generator().manual_seed(0)) for i in batch)
    assert seen == sorted(set(seen))
    tokens, targets = task.train_set[3]
    assert tokens[1:].tolist() == targets[:-1].tolist() == task.text.train[15:19].tolist()
    limited = task_for(tmp_path, "words", length=5, train_limit=3, eval_limit=1)
    assert (len(limited.train_set), len(limited.eval_set)) == (3, 1)


@pytest.mark.parametrize("converted", [False, True], ids=["plain", "converted"])
@pytest.mark.parametrize("model_name", ["gpt-tiny", "transformer-lm"])
def test_learns_a_text_by_heart(tmp_path, model_name, converted):
    options = {"layers": 1, "dim": 32, "hidden": 64, "heads": 2}
    task = task_for(tmp_path, "words", model_name, options, length=14)
    (tmp_path / "valid.txt").write_text(TEXT)
    task = make_task(task.config)
    torch.manual_seed(0)
    model = task.build()
    if converted:
        ndpp.convert_(model, ndpp.Settings(scale="standardize"))
    batch = task.collate([task.train_set[i] for i in range(len(task.train_set))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = evaluated(task, model)["perplexity"]
    model.train()
    for _ in range(50):
        task.loss(model, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first > 10
    assert evaluated(task, model)["perplexity"] < 1.3


def test_export_files_and_options(tmp_path):
    task = task_for(tmp_path)
    (tokens,) = task.example()
    assert task.exportable(task.build())(tokens).shape == (1, 16, task.text.size)
    assert list(task.files()) == ["tokenizer.json"]
    assert task.files() == task_for(tmp_path).files()
    assert task_for(tmp_path, "bytes").files()["tokenizer.json"].startswith('{"kind": "bytes"')
    assert task.build().embedding.places.num_embeddings == 1024
    with pytest.raises(ConfigError, match=r"model\.name: expected one of gpt-small"):
        task_for(tmp_path, model="transformer-iwslt").build()
