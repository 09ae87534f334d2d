"""The same work in TRL's GRPOTrainer; runs in TRL's own environment and imports nothing of grpo_lab.

Prints one JSON line: the seconds of each update.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts")
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--response", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [1.0 if "w1 " in completion else -1.0 for completion in completions]

    responses = arguments.groups * arguments.group_size
    config = GRPOConfig(
        output_dir="trl_out",
        use_cpu=True,
        bf16=arguments.bf16,
        per_device_train_batch_size=responses,
        gradient_accumulation_steps=1,
        num_generations=arguments.group_size,
        max_completion_length=arguments.response,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch",
        gradient_checkpointing=arguments.checkpointing,
        max_steps=arguments.updates,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in Path(arguments.prompts).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    print(
        json.dumps({"seconds": [b - a for a, b in zip(ends, ends[1:], strict=False)], "mean_length": lengths}),
        flush=True,
    )


if __name__ == "__main__":
    main()
