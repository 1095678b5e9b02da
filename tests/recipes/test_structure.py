"""The second package: what it imports, and how large its files are."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import ndpp_recipes

SOURCE = Path(ndpp_recipes.__file__).parent
CORE = SOURCE.parent / "ndpp"
OPTIONAL = (
    "torchvision",
    "timm",
    "pycocotools",
    "sacrebleu",
    "tokenizers",
    "datasets",
    "pyarrow",
    "tensorboard",
    "PIL",
)
MORE = ("lightning", "pytorch_lightning", "transformers", "rich", "matplotlib", "onnx", "safetensors")


def test_the_core_does_not_know_the_recipes() -> None:
    for path in CORE.rglob("*.py"):
        assert "ndpp_recipes" not in path.read_text(), path


def test_files_are_readable() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert max(lines.values()) < 400, lines


def test_import_needs_torch_and_numpy_alone() -> None:
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({OPTIONAL + MORE!r}))\n"  # an import of any fails
        "import ndpp_recipes, ndpp_recipes.cli, ndpp_recipes.callbacks, ndpp_recipes.report\n"
        "print(ndpp_recipes.cli.main(['recipes']), ndpp_recipes.cli.main(['train', 'cifar', '--data', '.']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0 2\n")
    assert "needs torchvision: pip install 'ndpp[recipes]'" in done.stderr


def test_public_names_exist() -> None:
    assert all(hasattr(ndpp_recipes, name) for name in ndpp_recipes.__all__)
    for path in SOURCE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what it is"
