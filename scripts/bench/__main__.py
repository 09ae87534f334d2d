"""Measure speed and memory on this machine: `make bench`, or `python -m scripts.bench [part ...]`.

Parts:
  trl       the same work in TRL's GRPOTrainer and in `grpo_lab.train`, in turn
  update    one update end to end, by phase
  learner   the learner alone: speed against matrix products, memory
  sampler   the embedded sampler against model.generate and vLLM
  growth    cost by group size, response length, minibatch size and v
  settings  TRL with other settings (only if named: minutes)

Writes OUT/<time>.json and prints a table for each part. See docs/speed.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_lab.composition import compose_run
from scripts.bench import growth, learner, sampler, update, versus_trl
from scripts.bench.measure import ROOT, start_server
from scripts.bench.report import Row, table
from scripts.bench.runs import Bench

PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "trl": versus_trl.measure,
    "update": update.measure,
    "learner": learner.measure,
    "sampler": sampler.measure,
    "growth": growth.measure,
    "settings": versus_trl.measure_settings,
}
DEFAULT = ("trl", "update", "learner", "sampler", "growth")


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": compose_run([]).hardware.threads,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; without: the first five")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench")
    arguments = parser.parse_args()
    for name in arguments.parts:
        if name not in PARTS:
            parser.error(f"no part is called {name}: one of {', '.join(PARTS)}")
    if not sys.platform.startswith("linux"):
        parser.error("memory is read from /proc, which is Linux's")
    bench = Bench(arguments.out.resolve() / "work")
    bench.folder.mkdir(parents=True, exist_ok=True)
    start_server()
    report: dict[str, Any] = {"machine": machine(), "parts": {}}
    path = arguments.out / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    for name in arguments.parts or DEFAULT:
        start = time.perf_counter()
        rows = PARTS[name](bench)
        seconds = time.perf_counter() - start
        report["parts"][name] = {"seconds": seconds, "rows": [row.plain() for row in rows]}
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"## {name} ({seconds:.0f} s)\n\n{table(rows)}\n", flush=True)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
