"""Real processes with a gloo group between them, which run named checks in order; nothing they say is lost.

`python ranks.py MODULE RANKS RANK FOLDER` is one of them. A check that raises on any rank ends the job: what the others
wait for would never come.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = timedelta(seconds=60)  # of a rank that waits for others


def run(module: str, ranks: int, folder: Path, seconds: float = 240) -> dict[str, str]:
    """What became of every check of `module` with so many ranks: "" if it holds, else what was wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    path = [str(HERE.parent / "src"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(HERE / "ranks.py"), module, str(ranks), str(rank), str(folder)]
        with log.open("w") as out:
            processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
    deadline, codes = time.monotonic() + seconds, []
    for process in processes:
        try:
            codes.append(str(process.wait(max(deadline - time.monotonic(), 0.1))))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(f"killed after {seconds:.0f} s")
    said = [json.loads(line) for line in _lines(folder / "results.jsonl")]
    results = dict(said)
    if any(code != "0" for code in codes):
        shown = "\n".join(f"--- rank {r}: exit {c}\n{logs[r].read_text()[-3000:]}" for r, c in enumerate(codes))
        results["the job"] = shown
    return results


def _lines(path: Path) -> Iterable[str]:
    return path.read_text().splitlines() if path.exists() else ()


def main(module: str, ranks: int, rank: int, folder: Path) -> None:
    """Run the checks: each returns on rank 0 what is wrong, in words, or nothing."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    checks = importlib.import_module(module).CHECKS[ranks]
    with (folder / ("results.jsonl" if rank == 0 else f"results{rank}.jsonl")).open("a") as results:
        for name, check in checks.items():
            torch.manual_seed(0)
            begin = time.monotonic()
            try:
                wrong = check(folder)
            except BaseException:
                traceback.print_exc()
                print(f"in the check {name!r} on rank {rank}", flush=True)
                results.write(json.dumps([name, traceback.format_exc()]) + "\n")
                raise
            results.write(json.dumps([name, wrong or ""]) + "\n")
            results.flush()
            print(f"{time.monotonic() - begin:6.2f} s  {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
