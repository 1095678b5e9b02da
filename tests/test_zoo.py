"""Real models: convert, two training steps, evaluate, fold. All 228 with -m slow, a representative few by default."""

import pytest
from benchmarks.sweep import sweep
from benchmarks.zoo import ZOO, Entry


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", [e for e in ZOO if e.default], ids=lambda e: e.name)
def test_representative_models(entry: Entry) -> None:
    """`sweep` asserts that every layer is converted or has a reason, losses are finite, and the fold agrees."""
    record = sweep(entry)
    assert record["converted"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", [e for e in ZOO if not e.default], ids=lambda e: e.name)
def test_all_models(entry: Entry) -> None:
    sweep(entry)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["torchvision/resnet18", "transformers/ViTForImageClassification"])
def test_presets_with_scale(name: str) -> None:
    (entry,) = (e for e in ZOO if e.name == name)
    sweep(entry, "detection" if "resnet" in name else "transformer")
