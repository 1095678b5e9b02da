"""No speed of code that computes something else: the matching tests run first, and a red one ends the command."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

from .records import ROOT, header

TESTS = "tests/test_kernels.py"
LINES = 30  # of pytest's output, shown when it fails


def require_green(device: str) -> None:
    """Run the quick tests of what is about to be timed on this kind of device; SystemExit unless some passed."""
    which = "gpu" if device.startswith("cuda") else "not gpu and not slow"
    folders = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    # No -q: with the one of pyproject.toml it would hide how many passed.
    command = [sys.executable, "-m", "pytest", "-x", TESTS, "-m", which]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    print(f"running {TESTS} first (--unchecked to skip)", file=sys.stderr, flush=True)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = (result.stdout + result.stderr).strip().splitlines()
    # Tests that were all skipped (no device after all) are no proof either, though pytest calls that a success.
    if result.returncode != 0 or not re.search(r"\d+ passed", result.stdout):
        tail = "\n".join(lines[-LINES:])
        raise SystemExit(f"{tail}\n\nno times while these tests are not green: {TESTS} -m {which!r} (or --unchecked)")


def begin(options: argparse.Namespace, what: str) -> None:
    """Tests, then the header of a speed command."""
    if not options.unchecked:
        require_green(options.device)
    checked = "" if not options.unchecked else "; unchecked"
    print(f"{header(options.device)}; {what}{checked}\n", flush=True)
