"""No speed of code that computes something else: the matching tests run first, and a red one ends the command."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from typing import Any

from .records import ROOT, header

TESTS = "tests/test_kernels.py"
PARTS = 6  # processes on a GPU: most of their time is compiling kernels
LINES = 30  # of pytest's output, shown when it fails


class Tests:
    """The quick tests of what is about to be timed on this kind of device, in processes of their own."""

    def __init__(self, device: str) -> None:
        cuda = device.startswith("cuda")
        self.which = "gpu" if cuda else "not gpu and not slow"
        folders = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        # Without the options of pyproject.toml: they ask for a plugin, and a second -q hides how many passed.
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", TESTS, "-m", self.which]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        print(f"running {TESTS} first (--unchecked to skip)", file=sys.stderr, flush=True)
        options: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        parts = [[f"--part={number}/{PARTS}"] for number in range(PARTS)] if cuda else [[]]
        self.processes = [subprocess.Popen([*command, *part], text=True, **options) for part in parts]

    def require_green(self) -> None:
        """Wait for them; SystemExit unless some passed in each and none failed."""
        for output, process in [(process.communicate()[0], process) for process in self.processes]:
            # Tests that were all skipped (no device after all) are no proof either, though pytest calls it a success.
            if process.returncode != 0 or not re.search(r"\d+ passed", output):
                tail = "\n".join(output.strip().splitlines()[-LINES:])
                told = f"no times while these tests are not green: {TESTS} -m {self.which!r} (or --unchecked)"
                raise SystemExit(f"{tail}\n\n{told}")


def begin(options: argparse.Namespace, what: str) -> None:
    """Tests, then the header of a speed command."""
    if not options.unchecked:
        Tests(options.device).require_green()
    checked = "" if not options.unchecked else "; unchecked"
    print(f"{header(options.device)}; {what}{checked}\n", flush=True)
