"""What a training step launches: a trace for chrome://tracing, and the kernels by the time they take."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .timing import Call, markdown, synchronize

STEPS = 3
COPIES = ("Memcpy", "Memset")
LAUNCHES = ("LaunchKernel", "GraphLaunch")  # within the names of the driver's and the runtime's calls


def profiled(step: Call, device: str, folder: Path, name: str) -> dict[str, float]:
    """Write NAME.json (trace) and NAME.txt (table); per step: kernels, launches by the host, milliseconds of kernels.

    A graph is one launch of many kernels. On a CPU, operators stand for kernels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    synchronize(device)
    with profile(activities=activities) as recorded:
        for _ in range(STEPS):
            step()
        synchronize(device)
    recorded.export_chrome_trace(str(folder / f"{name}.json"))
    found: Any = recorded.events()
    events = [event for event in found if not getattr(event, "is_user_annotation", False)]
    on_device = [event for event in events if (event.device_type == DeviceType.CUDA) == cuda]
    times: dict[str, list[float]] = defaultdict(list)
    for event in on_device:
        # An operator's own time, as others may be called within it; kernels hold no others.
        times[event.name].append(event.time_range.elapsed_us() if cuda else event.self_cpu_time_total)
    (folder / f"{name}.txt").write_text(table(times) + "\n")
    launches = sum(any(word in event.name for word in LAUNCHES) for event in events)
    kernels = sum(not event.name.startswith(COPIES) for event in on_device)
    busy = sum(map(sum, times.values())) / 1000
    return {"kernels": kernels / STEPS, "launches": launches / STEPS, "kernel_ms": busy / STEPS}


def table(times: dict[str, list[float]]) -> str:
    """By total time; microseconds come in, milliseconds per step go out."""
    rows = []
    for name, taken in sorted(times.items(), key=lambda item: -sum(item[1])):
        mean = sum(taken) / len(taken)
        per_step = sum(taken) / 1000 / STEPS
        rows.append((f"{per_step:.3f}", f"{len(taken) / STEPS:.1f}", f"{mean:.1f}", name))
    return markdown(("ms per step", "calls per step", "µs per call", "name"), rows)
