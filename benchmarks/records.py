"""What every result record carries: versions, device, source and date."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ndpp

ROOT = Path(__file__).resolve().parent.parent


# With these in its environment glibc keeps what is freed. By default it gives large tensors back, and is handed them
# again page by page, which can take longer than what is computed with them.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    keeps = ", memory kept" if all(os.environ.get(name) == value for name, value in KEEPS_MEMORY.items()) else ""
    return f"{platform.machine()}, {torch.get_num_threads()} threads{keeps}"


def header(device: str) -> str:
    return f"{device_name(device)}, torch {torch.__version__}, ndpp {ndpp.__version__}"


def source() -> str:
    """A hash of the library, where there is no version control to ask."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """As git describes it, where there is git and a repository."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def append(out: Path | None, record: dict[str, Any], device: str) -> None:
    """One JSON line; nothing without a file."""
    if out is None:
        return
    versions = {"torch": torch.__version__, "ndpp": ndpp.__version__, "device": device_name(device)}
    stamp = {**versions, "source": source(), "commit": commit()}
    stamp["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps({**record, **stamp}) + "\n")
