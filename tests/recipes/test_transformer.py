"""The Transformers against torch's own attention, brute force and themselves."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ndpp
from ndpp_recipes.errors import ConfigError
from ndpp_recipes.models.transformer import (
    LANGUAGE_MODELS,
    TRANSLATORS,
    Attention,
    LanguageModel,
    Shape,
    Translator,
    build_language_model,
    build_translator,
    generate,
)

PAD, BOS, EOS = 0, 1, 2
SHAPE = Shape(16, 2, 2, 32, dropout=0.0)
SETTINGS = ndpp.Settings(scale="standardize")
BOTH = pytest.mark.parametrize("converted", [False, True], ids=["plain", "converted"])


def sentences(lengths, vocabulary=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def translator(converted=False, **options):
    """In evaluation mode, with statistics of two steps if converted."""
    torch.manual_seed(0)
    model = build_translator("transformer-tiny", 20, PAD, **options)
    if converted:
        ndpp.convert_(model, SETTINGS)
        for seed in range(2):
            model(sentences([9, 4, 7], seed=seed), sentences([5, 6, 3], seed=seed + 10)).sum().backward()
    return model.eval()


def language_model(converted=False, name="gpt-tiny"):
    torch.manual_seed(0)
    model = build_language_model(name, 20, **({} if name == "gpt-tiny" else {"layers": 2, "dim": 64, "hidden": 64}))
    if converted:
        ndpp.convert_(model, SETTINGS)
        model(sentences([12, 12])).sum().backward()
    return model.eval()


# --- what it computes ---


@pytest.mark.parametrize("kind", ["causal", "padded", "cross"])
def test_attention_is_torchs(kind):
    torch.manual_seed(0)
    ours, theirs = Attention(SHAPE, causal=kind == "causal"), nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    if kind == "causal":
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        expected, actual = theirs(x, x, x, attn_mask=later)[0], ours(x)
    elif kind == "padded":
        valid = torch.arange(5) < torch.tensor([[5], [2], [1]])
        expected, actual = theirs(x, x, x, key_padding_mask=~valid)[0], ours(x, None, valid)
    else:
        valid = torch.arange(7) < torch.tensor([[7], [3], [1]])
        expected, actual = theirs(x, memory, memory, key_padding_mask=~valid)[0], ours(x, memory, valid)
    torch.testing.assert_close(actual, expected)


def attention_weights(ours):
    parts = [ours.query, ours.key, ours.value]
    packed = {f"in_proj_{kind}": torch.cat([getattr(part, kind) for part in parts]) for kind in ("weight", "bias")}
    return {**packed, "out_proj.weight": ours.output.weight, "out_proj.bias": ours.output.bias}


def copied(ours, theirs):
    """The weights of our layer in torch's TransformerDecoderLayer."""
    names = {"norm1": "self_attention_norm", "norm2": "cross_attention_norm", "norm3": "feed_forward_norm"}
    state = {f"{n}.{k}": v for n, m in names.items() for k, v in ours.get_submodule(m).state_dict().items()}
    for name, attention in (("self_attn", ours.self_attention), ("multihead_attn", ours.cross_attention)):
        state |= {f"{name}.{key}": value for key, value in attention_weights(attention).items()}
    for name, number in (("linear1", 0), ("linear2", 2)):
        state |= {f"{name}.{key}": value for key, value in ours.feed_forward[number].state_dict().items()}
    theirs.load_state_dict(state)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_decoder_is_torchs(pre_norm):
    torch.manual_seed(0)
    model = Translator(Shape(16, 2, 2, 32, dropout=0.0, pre_norm=pre_norm), 20, PAD)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # norms as well
    layer = nn.TransformerDecoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=pre_norm)
    theirs = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(16) if pre_norm else None)
    for mine, other in zip(model.decoder.layers, theirs.layers, strict=True):
        copied(mine, other)
    if pre_norm:
        theirs.norm.load_state_dict(model.decoder.norm.state_dict())
    x, memory, valid = (
        torch.randn(2, 5, 16),
        torch.randn(2, 4, 16),
        torch.tensor([[True] * 4, [True, True, False, False]]),
    )
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=later, memory_key_padding_mask=~valid)
    torch.testing.assert_close(model.decoder(x, memory, valid), expected)


def test_positions_are_sines_of_geometric_rates():
    embedding = LanguageModel(Shape(8, 1, 1, 8, dropout=0.0), 5).embedding.eval()
    token = embedding.tokens(torch.tensor(3)) * math.sqrt(8)
    found = embedding(torch.full((1, 6), 3), start=4)[0] - token
    expected = [
        [function((4 + t) / 10_000 ** (i / 4)) for function in (math.sin, math.cos) for i in range(4)] for t in range(6)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)


# --- padding, causality, cache ---


@BOTH
def test_a_padded_batch_gives_what_single_sentences_give(converted):
    model = translator(converted)
    lengths = [(9, 5), (4, 8), (1, 1)]
    source, target = sentences([a for a, _ in lengths]), sentences([b for _, b in lengths], seed=1)
    together = model(source, target)
    for row, (a, b) in enumerate(lengths):
        alone = model(source[row : row + 1, :a], target[row : row + 1, :b])
        torch.testing.assert_close(together[row : row + 1, :b], alone, atol=1e-4, rtol=1e-4)


def test_statistics_leave_padding_out():
    """In training, more padding changes neither logits nor running statistics."""
    source, target = sentences([6, 3]), sentences([5, 2], seed=1)
    states, logits = [], []
    for extra in (0, 4):
        model = translator(dropout=0.0)
        ndpp.convert_(model, SETTINGS.replace(rows=None))
        model.train()
        y = model(F.pad(source, (0, extra)), F.pad(target, (0, extra)))
        logits.append(y[0, :5])
        states.append({k: v for k, v in model.state_dict().items() if "running" in k})
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    assert len(states[0]) > 60
    torch.testing.assert_close(states[0], states[1], atol=1e-4, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("kind", ["translator", "gpt-tiny", "transformer-lm"])
def test_evaluation_is_causal(kind, converted):
    """In evaluation no logit depends on a later token, and the last one depends on all."""
    if kind == "translator":
        model, source = translator(converted), sentences([7, 5])

        def logits(tokens):
            return model(source, tokens)
    else:
        logits = language_model(converted, kind)
    tokens = sentences([8, 8], seed=2)
    base = logits(tokens)
    for place in range(8):
        changed = tokens.clone()
        changed[:, place] = (tokens[:, place] - 3 + 1) % 17 + 3
        new = logits(changed)
        torch.testing.assert_close(new[:, :place], base[:, :place], atol=1e-5, rtol=1e-5)
        assert (new[:, place:] - base[:, place:]).abs().amax(dim=(0, 2)).min() > 1e-5


@BOTH
def test_translator_steps_equal_one_pass(converted):
    model = translator(converted)
    source, target = sentences([7, 4]), sentences([6, 6], seed=1)
    whole = model(source, target)
    memory, valid = model.encode(source)
    cache = {}
    steps = [model.step(target[:, t], memory, valid, cache) for t in range(6)]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole, atol=1e-4, rtol=1e-4)


@BOTH
@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-lm"])
def test_language_model_in_chunks_equals_one_pass(name, converted):
    model = language_model(converted, name)
    tokens = sentences([10, 10], seed=3)
    cache = {}
    parts = [model(chunk, cache) for chunk in tokens.split([4, 1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=1e-4, rtol=1e-4)


# --- conversion ---


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["translator", "language"])
def test_conversion_takes_every_layer_and_norm(kind, tied, pre_norm):
    shape = Shape(16, 2, 2, 32, tied=tied, pre_norm=pre_norm)
    model = Translator(shape, 20, PAD) if kind == "translator" else LanguageModel(shape, 20)
    report = ndpp.convert_(model, SETTINGS)
    plain = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, ndpp.Linear)]
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert plain == (["output"] if tied else [])
    assert norms == (["decoder.norm"] if tied and pre_norm else [])  # it is before the layer that is left alone
    layers = {"translator": 2 * 6 + 2 * 10, "language": 2 * 6}[kind]
    assert len(report.converted) == layers + (not tied)


def test_tied_output_says_why_it_is_left_alone():
    report = ndpp.convert_(translator().train(), SETTINGS)
    notes = {row.path: row.note for row in (*report.layers, *report.norms)}
    assert "tied to embedding.tokens.weight" in notes["output"]
    assert "not decorrelated" in notes["decoder.norm"]


def test_folds_and_exports():
    model = translator(converted=True, layers=1, dim=16)
    source, target = sentences([6, 3]), sentences([5, 2], seed=1)
    expected = model(source, target)
    folded = ndpp.fold_(copy.deepcopy(model))
    torch.testing.assert_close(folded(source, target), expected, atol=1e-4, rtol=1e-4)
    exported = torch.export.export(folded, (source, target)).module()
    torch.testing.assert_close(exported(source, target), expected, atol=1e-4, rtol=1e-4)


# --- sizes and initial values ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt-small", 50_257 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768),  # GPT-2's 124 million
        ("transformer-lm", 50_257 * 512 + 6 * (4 * 512 * 513 + 2 * 512 * 2048 + 2048 + 512 + 4 * 512) + 2 * 512),
    ],
)
def test_language_models_have_their_sizes(name, parameters):
    with torch.device("meta"):
        model = build_language_model(name, 50_257)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_iwslt_has_its_size():
    with torch.device("meta"):
        model = build_translator("transformer-iwslt", 10_000, PAD)
    attention, hidden, norm = 4 * 512 * 513, 2 * 512 * 1024 + 1024 + 512, 2 * 512
    expected = 10_000 * 512 + 6 * (attention + hidden + 2 * norm) + 6 * (2 * attention + hidden + 3 * norm) + 2 * norm
    assert sum(p.numel() for p in model.parameters()) == expected
    assert {layer.self_attention.heads for layer in model.decoder.layers} == {4}
    assert set(TRANSLATORS) | set(LANGUAGE_MODELS) >= {"transformer-tiny", "gpt-mini", "gpt-tiny"}


def test_initial_values():
    torch.manual_seed(0)
    gpt = build_language_model("gpt-mini", 2000)
    layer = gpt.decoder.layers[0]
    found = [gpt.embedding.tokens, layer.self_attention.query, layer.self_attention.output, layer.feed_forward[2]]
    stds = [module.weight.std().item() for module in found]
    assert stds == pytest.approx([0.02, 0.02, 0.02 / math.sqrt(12), 0.02 / math.sqrt(12)], rel=0.02)
    fairseq = build_translator("transformer-tiny", 2000, PAD)
    layer = fairseq.encoder.layers[0]
    found = [fairseq.embedding.tokens, layer.self_attention.query, layer.self_attention.output]
    stds = [module.weight.std().item() for module in found]
    assert stds == pytest.approx([64**-0.5, math.sqrt(1 / 128), math.sqrt(2 / 128)], rel=0.05)
    assert fairseq.output.weight is fairseq.embedding.tokens.weight


def test_errors_name_the_option():
    with pytest.raises(ConfigError, match=r"model.name: expected one of gpt-small.*'gpt-huge'"):
        build_language_model("gpt-huge", 10)
    with pytest.raises(ConfigError, match=r"model.options.depth.*layers"):
        build_language_model("gpt-tiny", 10, depth=3)
    with pytest.raises(ConfigError, match="dim 64, heads 5"):
        build_language_model("gpt-tiny", 10, heads=5)
    with pytest.raises(ConfigError, match="sinusoidal or learned; got 'rotary'"):
        build_language_model("gpt-tiny", 10, positions="rotary")
    with pytest.raises(ConfigError, match=r"9 tokens.*for 8.*max_positions"):
        build_language_model("gpt-tiny", 10, max_positions=8)(torch.zeros(1, 9, dtype=torch.long))


# --- decoding ---


def peaked(vocabulary, sharpness=6.0, seed=0):
    """A network whose distributions are far from uniform."""
    torch.manual_seed(seed)
    model = Translator(Shape(16, 1, 2, 32, dropout=0.0), vocabulary, PAD)
    model.output.weight = nn.Parameter(torch.randn(vocabulary, 16) * sharpness / 4)
    return model.eval()


def score(model, source, sentence, penalty):
    """log p of a sentence and its eos, over length^penalty."""
    with torch.no_grad():
        tokens = torch.tensor([[BOS, *sentence]])
        log_p = model(source, tokens)[0].double().log_softmax(dim=1)
    targets = [*sentence, EOS]
    return sum(float(log_p[t, token]) for t, token in enumerate(targets)) / len(targets) ** penalty


def limit_of(source):
    return int((source != PAD).sum()) * 12 // 10 + 10


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all(monkeypatch, penalty, seed):
    """With two words and up to 5 of them, a beam of 64 leaves nothing out."""
    model = peaked(5, seed=seed)
    source = torch.tensor([[3, 4, 3, EOS], [4, EOS, PAD, PAD]])
    longest = 5
    monkeypatch.setattr("ndpp_recipes.models.transformer.length_limits", lambda valid: valid.sum(1) * 0 + longest)
    found = generate(model, source, bos=BOS, eos=EOS, beam=64, length_penalty=penalty)
    every = [list(words) for n in range(longest + 1) for words in itertools.product([3, 4], repeat=n)]
    for row in range(2):
        alone = source[row : row + 1, : int((source[row] != PAD).sum())]
        best = max(every, key=lambda sentence: score(model, alone, sentence, penalty))
        assert found[row] == best


def slow_beam(model, source, beam, penalty):
    """Beam search with lists, running the whole network on every hypothesis."""
    alive, ended = [([], 0.0)], []
    for step in range(limit_of(source) + 1):
        candidates = []
        for words, total in alive:
            with torch.no_grad():
                log_p = model(source, torch.tensor([[BOS, *words]]))[0, -1].log_softmax(dim=0).tolist()
            allowed = [EOS] if step == limit_of(source) else range(2, len(log_p))
            candidates += [(words, token, total + log_p[token]) for token in allowed]
        candidates.sort(key=lambda c: -c[2])
        ended += [(w, s / (len(w) + 1) ** penalty) for w, token, s in candidates[:beam] if token == EOS]
        if len(ended) >= beam:
            break
        alive = [([*w, token], s) for w, token, s in candidates[: 2 * beam] if token != EOS][:beam]
    return max(ended, key=lambda e: e[1])[0]


@pytest.mark.parametrize(("beam", "penalty"), [(1, 1.0), (2, 0.6), (4, 1.0)])
def test_beams_equal_slow_ones(beam, penalty):
    model = peaked(9, sharpness=3.0, seed=5)
    source = sentences([6, 2, 4, 1], vocabulary=9)
    found = generate(model, source, bos=BOS, eos=EOS, beam=beam, length_penalty=penalty)
    for row in range(len(source)):
        alone = source[row : row + 1, : int((source[row] != PAD).sum())]
        assert found[row] == slow_beam(model, alone, beam, penalty)
    assert len({len(words) for words in found}) > 1  # they do not all run to the limit


# --- learning ---


def test_learns_to_reverse():
    torch.manual_seed(0)
    model = build_translator("transformer-tiny", 12, PAD, dropout=0.0, layers=1, dim=32, hidden=64)
    source = sentences([5, 4, 5, 3] * 4, vocabulary=12)
    rows = [row[row != PAD].flip(0).tolist() for row in source]
    target = nn.utils.rnn.pad_sequence(
        [torch.tensor([BOS, *row, EOS]) for row in rows], batch_first=True, padding_value=PAD
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        logits = model(source, target[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD).backward()
        optimizer.step()
    assert generate(model.eval(), source, bos=BOS, eos=EOS) == rows
