"""The package as a user meets it: import, public names, documentation that runs, structure."""

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import summary
from torch import nn

import ndpp

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ndpp"
CORE = [
    *("version", "settings", "keeping", "whitening", "roots", "adjoints", "sync", "masking", "geometry"),
    *(
        "sampling",
        "rows",
        "kernels.plan",
        "kernels.plain_moments",
        "kernels.plain_scale",
        "kernels.plain",
        "kernels.cases",
        "kernels",
    ),
    *("products", "stages", "statistics", "transform", "sharing", "recorded", "decorrelated", "layers"),
]
KERNELS = [
    "triton_direct",
    "triton_launch",
    "triton_rows",
    "triton_moments",
    "triton_gathered",
    "triton_root",
    "triton_root_wide",
    "triton_fold",
]
KERNELS += [
    "triton_scale",
    "triton_normal",
    "triton_passes",
    "triton_moments_adjoint",
    "triton_observe",
    "triton_stages",
]
CONVERSION = ["surgery", "norms", "reading", "report", "planning", "tracing", "absorb", "adopt"]
CONVERSION += ["convert", "fold", "share"]
PACKAGES = ("conversion", "kernels")
ORDER = [
    *CORE,
    *(f"kernels.{name}" for name in KERNELS),
    *("attention", "foreign", "feeding", "recalibrate"),
    *(f"conversion.{name}" for name in CONVERSION),
    *("conversion", "inspection", "__main__"),
]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_import_is_light() -> None:
    """No CUDA context and no heavy import that torch itself did not make."""
    code = (
        "import sys, torch; before = set(sys.modules); import ndpp; new = set(sys.modules) - before;"
        "print(torch.cuda.is_initialized(), sorted(m for m in new if m.split('.')[0] in "
        "('triton', 'torchvision', 'timm', 'transformers', 'matplotlib', 'rich', 'onnx', 'scipy', 'PIL')))"
    )
    assert python(code) == "False []"


def test_import_adds_little_to_torch() -> None:
    """What ndpp itself adds is small: counted in modules, for seconds would be the machine's."""
    code = (
        "import sys, torch; before = set(sys.modules); import ndpp;print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    new = python(code).splitlines()
    assert set(new) <= {"ndpp", *(f"ndpp.{name}" for name in ORDER)} | {m for m in new if m.startswith("torch.")}
    assert len(new) < 44


def test_public_names() -> None:
    assert sorted(ndpp.__all__) == sorted(
        [
            *("Linear", *(f"Conv{t}{n}d" for t in ("", "Transpose") for n in (1, 2, 3)), "Settings", "mask"),
            *("convert_", "fold_", "recalibrate_", "share_", "inspect", "Report", "Inspection", "__version__"),
        ]
    )
    assert all(hasattr(ndpp, name) for name in ndpp.__all__)
    assert (SOURCE / "py.typed").exists()


def file_of(name: str) -> Path:
    return SOURCE / name / "__init__.py" if name in PACKAGES else SOURCE / f"{name.replace('.', '/')}.py"


def test_import_order() -> None:
    """Each file imports only from those before it."""
    assert set(SOURCE.rglob("*.py")) == {*map(file_of, ORDER), SOURCE / "__init__.py"}
    for position, name in enumerate(ORDER):
        inside = [package for package in PACKAGES if name.startswith(package)]
        for node in ast.walk(ast.parse(file_of(name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = inside[: len(inside) + 1 - node.level]
                names = [node.module] if node.module else [alias.name for alias in node.names]
                full = [".".join([*package, n]) for n in names]
                assert all(n in ORDER[:position] for n in full), (name, full)


def test_core_is_small() -> None:
    lines = {name: len(file_of(name).read_text().splitlines()) for name in ORDER}
    assert max(lines.values()) < 400, lines
    assert sum(lines[name] for name in CORE) < 5000


def test_every_file_has_a_row_in_the_architecture() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for path in sorted((ROOT / "src").glob("*/**/*.py")):
        folder = path.parent.name
        named = f"{path.name}`" in page or (folder not in ("ndpp", "ndpp_recipes") and f"`{folder}/`" in page)
        assert named or path.name in ("__init__.py", "__main__.py", "version.py"), path


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after the other."""
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    names = {"__name__": "documentation"}
    if page.name == "README.md":  # its first block speaks of the reader's own
        data = [torch.randn(16, 20) for _ in range(3)]
        models = {name: nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4)) for name in ("model", "pretrained")}
        names |= {**models, "batches": data, "loader": data, "batch": data[0]}
    exec(compile(code, page.name, "exec"), names)


def test_report_in_the_documentation_is_the_one_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "convert.md").read_text()
    code, shown = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page, re.DOTALL)[0]
    exec(compile(code, "convert.md", "exec"), {})
    assert capsys.readouterr().out == shown


def test_readme_example_learns() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    for seed in range(5):
        torch.manual_seed(seed)
        names: dict[str, list[float]] = {}
        exec(compile(code, "README.md", "exec"), names)
        assert names["losses"][-1] < 0.5 * names["losses"][0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, shown in re.findall(
        r"<!-- benchmarks summary: (\S+) -->\n(.*?)\n<!-- end -->", page.read_text(), re.DOTALL
    ):
        file = Path("benchmarks") / "results" / name
        summary.main(argparse.Namespace(files=[ROOT / file], markdown=True))
        printed = capsys.readouterr().out.strip()
        assert shown == printed, f"{page.name}: run python -m benchmarks summary --markdown {file}"


def test_ci_runs_the_readme_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert "make demo" in readme
