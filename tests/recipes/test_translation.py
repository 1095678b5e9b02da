"""Translation: batches, loss, decoding and BLEU."""

import math

import pytest
import sacrebleu
import torch
from torch.nn import functional as F

import ndpp
from ndpp_recipes.config import Config, ModelConfig, RunConfig, TranslationData
from ndpp_recipes.data.text import BOS, EOS, PAD
from ndpp_recipes.errors import ConfigError, DataError
from ndpp_recipes.models.transformer import generate
from ndpp_recipes.tasks import make_task
from ndpp_recipes.tasks.translation import bleu, for_decoding

NUMBERS = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def corpus(count, longest=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        size = int(torch.randint(1, longest + 1, (1,), generator=generator))
        digits = torch.randint(10, (size,), generator=generator).tolist()
        rows.append((" ".join(NUMBERS[d] for d in digits), " ".join(WORDS[d] for d in digits)))
    return rows


def write(folder, name, rows):
    (folder / f"{name}.de").write_text("".join(f"{a}\n" for a, _ in rows), encoding="utf-8")
    (folder / f"{name}.en").write_text("".join(f"{b}\n" for _, b in rows), encoding="utf-8")


def task_for(folder, train=60, valid=12, smoothing=0.0, options=None, **data):
    write(folder, "train", corpus(train))
    write(folder, "valid", corpus(valid, seed=1))
    model = {"layers": 1, "dim": 32, "hidden": 64, "dropout": 0.0, **(options or {})}
    return make_task(
        Config(
            recipe="test",
            task="translation",
            model=ModelConfig(name="transformer-tiny", options=model),
            data=TranslationData(path=str(folder), vocabulary=300, **data),
            run=RunConfig(label_smoothing=smoothing),
        )
    )


def batch_of(task, indices, data=None):
    data = data or task.train_set
    return task.collate([data[i] for i in indices])


# --- batches ---


def test_batches_hold_every_pair_once_within_their_tokens(tmp_path):
    task = task_for(tmp_path, train=200, max_tokens=60)
    epochs = [task.batches(10, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    for batches in epochs:
        assert sorted(i for batch in batches for i in batch) == list(range(200))
        for batch in batches:
            padded = batch_of(task, batch)
            assert padded["source"].numel() <= 60
            assert padded["target"][:, 1:].numel() <= 60
            assert len(batch) <= 10
    assert epochs[0] == epochs[1] != epochs[2]
    shapes = [sorted((len(batch), task.train_set.lengths[batch[-1]]) for batch in batches) for batches in epochs]
    assert shapes[0] == shapes[2]  # how many there are, and how long, depends on the data alone
    assert {frozenset(batch) for batch in epochs[0]} != {frozenset(batch) for batch in epochs[2]}
    assert len(epochs[0]) < 200 * 10 / 60 * 1.5  # and they are full


def test_a_sentence_longer_than_a_batch_is_one(tmp_path):
    task = task_for(tmp_path, max_tokens=3)
    assert {len(batch) for batch in task.batches(10, torch.Generator())} == {1}


def test_evaluation_goes_by_length_and_leaves_nothing_out(tmp_path):
    task = task_for(tmp_path, valid=30, max_length=8, max_tokens=60)
    batches = task.eval_batches(8)
    lengths = [task.eval_set.lengths[i] for batch in batches for i in batch]
    assert lengths == sorted(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(30))
    assert max(lengths) > 9  # max_length is for training


def test_long_pairs_are_reported(tmp_path, caplog):
    task = task_for(tmp_path, max_length=8)
    total = len(task.train_set) + task.train_set.too_long
    assert total == 60
    assert 0 < task.train_set.too_long < 60
    expected = f"{task.train_set.too_long} of 60 pairs have more than data.max_length = 8 tokens, and are left out"
    assert expected in caplog.text


def test_limits_use_the_first_records(tmp_path):
    task = task_for(tmp_path, train_limit=7, eval_limit=3)
    assert (len(task.train_set), len(task.eval_set)) == (7, 3)
    assert task.vocabulary.decode(task.train_set[6][1].tolist()) == corpus(60)[6][1]


def test_errors(tmp_path):
    with pytest.raises(
        DataError, match=r"expected pairs of sentences to train on; 0 cannot be used and 60 are too lon"
    ):
        task_for(tmp_path, max_length=1)
    with pytest.raises(ConfigError, match="beam: expected 1"):
        task_for(tmp_path, options={"beam": 0})
    with pytest.raises(ConfigError, match=r"model\.options\.width"):
        task_for(tmp_path, options={"width": 3}).build()


# --- loss ---


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_target_tokens(tmp_path, smoothing):
    task = task_for(tmp_path, smoothing=smoothing)
    model = task.build().eval()
    batch = batch_of(task, range(5))
    nll, smooth, count = 0.0, 0.0, 0
    for i in range(5):
        source, target = task.train_set[i]
        log_p = model(source[None], target[None, :-1])[0].log_softmax(dim=1)
        for t, token in enumerate(target[1:].tolist()):
            nll -= log_p[t, token].item()
            smooth -= log_p[t].mean().item()
            count += 1
    losses = task.loss(model, batch)
    assert losses["nll"].item() == pytest.approx(nll / count, rel=1e-4)
    assert losses["loss"].item() == pytest.approx(((1 - smoothing) * nll + smoothing * smooth) / count, rel=1e-4)
    assert task.count(batch) == count
    losses["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


# --- evaluation ---


def test_bleu_is_sacrebleus():
    references = ["The cat sat on the mat.", "Hello, world! How are you?", "It is 3,000 km away."]
    hypotheses = ["The cat sat on a mat.", "Hello world! How are you?", "It's 3,000 km far away."]
    assert bleu(references, references) == pytest.approx(100.0)
    assert bleu(hypotheses, references) == sacrebleu.BLEU(tokenize="13a").corpus_score(hypotheses, [references]).score
    assert 20 < bleu(hypotheses, references) < 80
    assert bleu(["", "", ""], references) == 0.0


def test_bleu_by_hand():
    """Precisions 5/6, 3/5, 1/4 and 0/3, which is smoothed to 1/2 of 1/3; no brevity penalty."""
    expected = 100 * (5 / 6 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25
    assert bleu(["the cat sat on a mat"], ["the cat sat upon a mat"]) == pytest.approx(expected)


@pytest.mark.parametrize("beam", [1, 3])
def test_meter_sees_every_sentence(tmp_path, beam):
    task = task_for(tmp_path, options={"beam": beam, "length_penalty": 0.7})
    torch.manual_seed(0)
    model = task.build().eval()
    meters = [task.meter(), task.meter()]  # of two ranks
    with torch.no_grad():
        for number, indices in enumerate(task.eval_batches(5)):
            meters[number % 2].update(model, batch_of(task, indices, task.eval_set))
    result = meters[0].result([meter.state() for meter in meters])
    nll, count, hypotheses, references = 0.0, 0, [], []
    for (_, reference), (source, target) in zip(corpus(12, seed=1), task.eval_set, strict=False):
        logits = model(source[None], target[None, :-1])[0]
        nll += F.cross_entropy(logits, target[1:], reduction="sum").item()
        count += len(target) - 1
        words = generate(model, source[None], bos=BOS, eos=EOS, beam=beam, length_penalty=0.7)[0]
        hypotheses.append(task.vocabulary.decode(words))
        references.append(reference)
    assert result["loss"] == pytest.approx(nll / count, rel=1e-4)
    assert result["ppl"] == pytest.approx(math.exp(nll / count), rel=1e-3)
    assert result["bleu"] == pytest.approx(bleu(hypotheses, references))
    seen = [pair for meter in meters for pair in zip(meter.hypotheses, meter.references, strict=True)]
    assert sorted(seen) == sorted(zip(hypotheses, references, strict=True))


@pytest.mark.parametrize("converted", [False, True], ids=["plain", "converted"])
def test_learns_to_translate(tmp_path, converted):
    task = task_for(tmp_path, train=16, valid=16, smoothing=0.1)
    write(tmp_path, "valid", corpus(16))  # what it was trained on
    task = make_task(task.config)
    torch.manual_seed(0)
    model = task.build()
    if converted:
        ndpp.convert_(model, ndpp.Settings(scale="standardize"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(70):
        task.loss(model, batch_of(task, range(16)))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    meter = task.meter()
    model.eval()
    with torch.no_grad():
        for indices in task.eval_batches(8):
            meter.update(model, batch_of(task, indices, task.eval_set))
    result = meter.result([meter.state()])
    assert result["bleu"] > 90
    assert result["ppl"] < 1.5
    assert not any(isinstance(m, ndpp.Linear) for m in meter.decoder.modules())
    assert any(isinstance(m, ndpp.Linear) for m in model.modules()) == converted  # the model itself is as it was


def test_export_and_files(tmp_path):
    task = task_for(tmp_path)
    model = task.build().eval()
    source, target = task.example()
    assert task.exportable(model)(source, target).shape == (1, target.shape[1], task.vocabulary.size)
    assert list(task.files()) == ["tokenizer.json"]
    assert task.files() == task_for(tmp_path).files()
    padded = batch_of(task, range(6))
    assert (padded["source"] == PAD).any()
    assert task.forward(model, padded).shape[:2] == (6, padded["target"].shape[1] - 1)


def test_decodes_a_sharded_model(tmp_path):
    """FSDP gathers weights in forward; decoding calls other methods."""
    from torch.distributed.fsdp import fully_shard

    task = task_for(tmp_path)
    torch.manual_seed(0)
    model = task.build().eval()
    source = batch_of(task, range(3), task.eval_set)["source"]
    expected = generate(model, source, bos=BOS, eos=EOS)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for layer in model.decoder.layers:
            fully_shard(layer)
        fully_shard(model)
        for _ in range(2):  # evaluated twice
            assert generate(for_decoding(model), source, bos=BOS, eos=EOS) == expected
    finally:
        torch.distributed.destroy_process_group()
