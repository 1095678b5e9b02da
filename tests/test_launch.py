"""What the driver is handed when a kernel is started without Triton's own launch, read back from memory."""

from __future__ import annotations

import ctypes
import itertools
import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import kernels as built_for

from ndpp.kernels import cases as kernel_cases
from ndpp.kernels import triton_direct
from ndpp.kernels.triton_direct import Direct, formats_of
from stages import Case, cases

NUMBERS = (7, -3, 0.25, 2**31 - 1, -1.5e30)


def compiled(**changes: Any) -> Any:
    told = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0}
    told |= {"profile_scratch_size": 0, "shared": 70000, "num_warps": 8, "target": SimpleNamespace(backend="cuda")}
    kinds = ["*fp32", "constexpr", "*i64", "i32", "i32", "fp32", "i32", "fp32", "constexpr"]
    signature = changes.pop("signature", dict(enumerate(kinds)))
    function = changes.pop("function", 2**40 + 5)
    source = SimpleNamespace(signature=signature)
    return SimpleNamespace(metadata=SimpleNamespace(**{**told, **changes}), src=source, function=function)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, as cuda.h declares it."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Driver:
    """Reads a launch as cuLaunchKernelEx and the kernel would."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.seen = code, []

    def __call__(self, config: int, function: int, places: int, extra: None) -> int:
        told = LaunchConfig.from_address(config)
        shape = [getattr(told, name) for name, _ in LaunchConfig._fields_[:7]]
        assert (told.attributes, told.count) == (None, 0)
        each = (ctypes.c_void_p * (2 + len(NUMBERS) + 2)).from_address(places)
        raw = [ctypes.string_at(place, 8) for place in each]
        pointers = [struct.unpack("<Q", value)[0] for value in (*raw[:2], *raw[-2:])]
        numbers = [struct.unpack_from(kind, value)[0] for kind, value in zip("iifif", raw[2:-2], strict=True)]
        self.seen.append((function, shape, told.stream, extra, pointers, numbers))
        return self.code


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)


def started_by(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Direct:
    monkeypatch.setattr(triton_direct, "driver", lambda: driver)
    direct = triton_direct.direct_start(compiled(), 2, (5, 6, 7), NUMBERS)
    assert direct is not None
    return direct


def test_every_argument_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    direct = started_by(driver, monkeypatch)
    rounded = [struct.unpack("<f", struct.pack("<f", n))[0] if isinstance(n, float) else n for n in NUMBERS]
    for first, second in ((torch.zeros(8), torch.zeros(4)), (torch.zeros(0), torch.zeros(5))):
        assert direct((first, second), 3)
        shape, addresses = [5, 6, 7, 256, 1, 1, 70000], [first.data_ptr(), second.data_ptr(), 0, 0]
        assert driver.seen[-1] == (2**40 + 5, shape, 1003, None, addresses, rounded)
    assert len(direct._free) == 1  # one set of arguments serves launches that follow each other


def test_launches_at_a_time_have_arguments_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Nested(Driver):
        def __call__(self, *arguments: Any) -> int:
            found.append(len(found))
            if len(found) == 1:
                assert direct((y, x), 1)  # another thread takes its turn
            return super().__call__(*arguments)

    driver, x, y = Nested(), torch.zeros(8), torch.zeros(8)
    direct = started_by(driver, monkeypatch)
    assert direct((x, y), 0)
    at = [x.data_ptr(), y.data_ptr()]
    assert [(seen[2], seen[4][:2]) for seen in driver.seen] == [(1001, at[::-1]), (1000, at)]


def test_what_the_driver_refuses_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not started_by(Driver(code=201), monkeypatch)((torch.zeros(8), torch.zeros(8)), 0)


def test_pointers_that_are_not_aligned_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    assert not started_by(driver, monkeypatch)((torch.zeros(8), torch.zeros(8)[1:]), 0)
    assert driver.seen == []


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
    if kernel_cases.MODE == "interpret":
        pytest.skip("the interpreter has no compiler")
    from ndpp.kernels import triton_launch

    for started in built_for.launches_of(built_for.SHAPES["3x3 by 16"], torch.bfloat16):
        made = triton_launch.compiled_for(started)
        made.function = 1  # as if it were loaded
        pointers = [a for a in started.arguments if isinstance(a, torch.Tensor)]
        rest = zip(started.kernel.params, started.arguments, strict=True)
        numbers = [a for p, a in rest if not (p.is_constexpr or a is None or isinstance(a, torch.Tensor))]
        found = formats_of(made, len(pointers), numbers)
        assert found == ["f4x" if isinstance(n, float) else "i4x" for n in numbers]


def test_without_a_driver_triton_starts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_direct, "driver", lambda: None)
    assert triton_direct.direct_start(compiled(), 2, (1, 1, 1), NUMBERS) is None


class Kernel:
    """As Triton's: started for a grid, it gives what it has compiled."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def start(*arguments: Any, num_warps: int, num_stages: int) -> Any:
            self.started.append((grid, arguments, num_warps, num_stages))
            return compiled()

        return start


def test_triton_starts_a_kind_of_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the driver does, with any grid and numbers; but for pointers that are not aligned, as they were then."""
    launch = pytest.importorskip("ndpp.kernels.triton_launch")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    driver, kernel = Driver(), Kernel()
    monkeypatch.setattr(triton_direct, "driver", lambda: driver)
    kind = launch.Launcher(kernel, 8, 2, ("a", 64))
    first, second = kind.prepared((5, 6, 7), *NUMBERS), kind.prepared((1, 2, 3), *NUMBERS)
    x, y = torch.zeros(64), torch.zeros(64)
    odd = torch.zeros(64)[1:]
    first(odd, y)
    rounded = [ctypes.c_float(n).value if isinstance(n, float) else n for n in NUMBERS]  # as a device takes them
    assert kernel.started == [((5, 6, 7), (odd, y, *rounded, "a", 64), 8, 2)]
    assert driver.seen == []
    first(x, y)
    assert len(kernel.started) == 2
    for number, (prepared, grid) in enumerate([(first, [5, 6, 7]), (second, [1, 2, 3]), (first, [5, 6, 7])]):
        prepared(x, y)
        assert len(driver.seen) == number + 1
        _, shape, _, _, pointers, _ = driver.seen[-1]
        assert (shape[:3], pointers[:2]) == (grid, [x.data_ptr(), y.data_ptr()])
    first(x, odd)
    driver.code = 201  # refused
    first(x, y)
    assert [len(kernel.started), len(driver.seen)] == [4, 4]


@cases
def test_what_one_compilation_serves_is_alike(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same pointers there, of the same dtypes, and numbers of the same kinds: the driver would not notice."""
    launch = pytest.importorskip("ndpp.kernels.triton_launch")
    served: dict[Any, set[tuple[Any, ...]]] = {}

    def record(self: Any, *pointers: torch.Tensor | None) -> None:
        kinds = [None if t is None else t.dtype for t in pointers], [type(n) for n in self.numbers]
        served.setdefault(self.launcher, set()).add((tuple(kinds[0]), tuple(kinds[1])))

    monkeypatch.setattr(launch.Prepared, "__call__", record)
    plan, weight = case.plan(solver="quartic"), case.layer().weight.detach()
    for dtype, channels_last in itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        built_for.step(plan, case.view(), case.input(dtype, channels_last), weight)
        built_for.step(replace(plan, scale="none"), case.view(), case.input(dtype, channels_last), weight.to(dtype))
    assert served
    assert all(len(kinds) == 1 for kinds in served.values()), served
