"""A model's responses for `scripts.judges`: python -m scripts.judges.sample MODEL DATA --out FILE

One response to each problem, sampled by the embedded engine at temperature 1, with the papers' prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from grpo_lab.composition import dataset_config
from grpo_lab.prompts import render
from grpo_lab.rollout.hf import HfEngine
from grpo_lab.seeds import derive
from grpo_lab.types import Sampling
from scripts.judges.__main__ import FILES, read_problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--problems", type=int, default=32, help="of each benchmark (default 32)")
    parser.add_argument("--tokens", type=int, default=160, help="most tokens of a response (default 160)")
    parser.add_argument("--benchmarks", nargs="+", default=list(FILES), choices=FILES)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, appended")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine = HfEngine.from_folder(arguments.model, max_rows=16)
    sampling = Sampling(temperature=1.0, max_tokens=arguments.tokens)
    for name in arguments.benchmarks:
        problems = read_problems(name, arguments.data, arguments.problems)
        prompts = render(problems, dataset_config(name), engine.tokenizer, max_prompt_tokens=1024).prompts
        seeds = [derive(0, "judges", prompt.id) for prompt in prompts]
        with arguments.out.open("a", encoding="utf-8") as lines:
            groups = engine.generate(prompts, group_size=1, sampling=sampling, seeds=seeds)
            for prompt, (rollout,) in zip(prompts, groups, strict=True):
                lines.write(json.dumps({"benchmark": name, "id": prompt.id, "response": rollout.text}) + "\n")


if __name__ == "__main__":
    main()
