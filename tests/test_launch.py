"""What the driver is handed when a kernel is started without Triton's own launch, read back from memory."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import kernels as built_for

from ndpp import kernels
from ndpp.kernels import triton_direct
from ndpp.kernels.triton_direct import Direct, formats_of

NUMBERS = (7, -3, 0.25, 2**31 - 1, -1.5e30)


def compiled(**changes: Any) -> Any:
    told = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    told |= {"profile_scratch_size": 0, "shared": 70000, "num_warps": 8, "target": SimpleNamespace(backend="cuda")}
    kinds = ["*fp32", "constexpr", "*i64", "i32", "i32", "fp32", "i32", "fp32", "constexpr"]
    signature = changes.pop("signature", dict(enumerate(kinds)))
    function = changes.pop("function", 2**40 + 5)
    source = SimpleNamespace(signature=signature)
    return SimpleNamespace(metadata=SimpleNamespace(**{**told, **changes}), src=source, function=function)


class Driver:
    """Reads the arguments of a launch as a kernel would."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.seen = code, []

    def __call__(self, function: int, *rest: Any) -> int:
        *shape, stream, places, extra = rest
        raw = [ctypes.string_at(place, 8) for place in places]
        pointers = [struct.unpack("<Q", value)[0] for value in (*raw[:2], *raw[-2:])]
        numbers = [struct.unpack_from(kind, value)[0] for kind, value in zip("iifif", raw[2:-2], strict=True)]
        self.seen.append((function, shape, stream, extra, pointers, numbers))
        return self.code


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)


def test_every_argument_arrives() -> None:
    formats = formats_of(compiled(), 2, NUMBERS)
    driver = Driver()
    direct = Direct(compiled(), formats, driver)
    rounded = [struct.unpack("<f", struct.pack("<f", n))[0] if isinstance(n, float) else n for n in NUMBERS]
    for first in (2**47 + 16, 0):
        assert direct((5, 6, 7), 3, (first, 32, *NUMBERS))
        shape = [5, 6, 7, 256, 1, 1, 70000]
        assert driver.seen[-1] == (2**40 + 5, shape, 1003, None, [first, 32, 0, 0], rounded)
    assert len(direct._free) == 1  # one set of arguments serves launches that follow each other


def test_launches_at_a_time_have_arguments_of_their_own() -> None:
    found = []

    class Nested(Driver):
        def __call__(self, *arguments: Any) -> int:
            found.append(len(found))
            if len(found) == 1:
                assert direct((1, 1, 1), 0, (48, 64, *NUMBERS))  # another thread takes its turn
            return super().__call__(*arguments)

    driver = Nested()
    direct = Direct(compiled(), formats_of(compiled(), 2, NUMBERS), driver)
    assert direct((1, 1, 1), 0, (16, 32, *NUMBERS))
    assert [seen[4][:2] for seen in driver.seen] == [[48, 64], [16, 32]]


def test_what_the_driver_refuses_is_left_to_triton() -> None:
    direct = Direct(compiled(), formats_of(compiled(), 2, NUMBERS), Driver(code=201))
    assert not direct((1, 1, 1), 0, (16, 32, *NUMBERS))


@pytest.mark.parametrize(
    "other",
    [
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 128},
        {"profile_scratch_size": 128},
        {"target": SimpleNamespace(backend="hip")},
        {"function": None},
        {"signature": dict(enumerate(["*fp32", "*i64", "i32", "i32", "fp32", "i64", "fp32"]))},
        {"signature": dict(enumerate(["*fp32", "*i64", "i32", "constexpr", "fp32", "i32", "fp32"]))},
        {"signature": dict(enumerate(["*fp32", "i32", "i32", "i32", "fp32", "i32", "fp32"]))},
    ],
    ids=str,
)
def test_other_kernels_are_left_to_triton(other: dict[str, Any]) -> None:
    assert formats_of(compiled(**other), 2, NUMBERS) is None


def test_a_compiled_kernel_of_another_make_is_left_to_triton() -> None:
    assert formats_of(SimpleNamespace(), 2, NUMBERS) is None


def test_every_kernel_is_started_directly() -> None:
    """As the installed Triton compiles them: none needs more than its arguments."""
    pytest.importorskip("triton")
    if kernels.MODE == "interpret":
        pytest.skip("the interpreter has no compiler")
    from ndpp.kernels import triton_launch

    for started in built_for.launches_of(built_for.SHAPES["3x3 by 16"], torch.bfloat16):
        made = triton_launch.compiled_for(started)
        made.function = 1  # as if it were loaded
        pointers = [a for a in started.arguments if isinstance(a, torch.Tensor)]
        rest = zip(started.kernel.params, started.arguments, strict=True)
        numbers = [a for p, a in rest if not (p.is_constexpr or a is None or isinstance(a, torch.Tensor))]
        found = formats_of(made, len(pointers), numbers)
        assert found == ["Q"] * len(pointers) + ["f4x" if isinstance(n, float) else "i4x" for n in numbers]


def test_without_a_driver_triton_starts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_direct, "driver", lambda: None)
    assert triton_direct.direct_start(compiled(), 2, NUMBERS) is None
