"""The same work in TRL's GRPOTrainer: runs in TRL's own environment and imports nothing of grpo_lab.

An update is made for each line that comes in, and answered by a line that begins with MARK: its seconds and the mean
length of its responses, as JSON. The end of the input ends the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "update: "
# Far more than are asked for; the learning rate is constant, so that nothing depends on it.
MAX_UPDATES = 1000


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--out", required=True)
    parser.add_argument("--responses", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--response", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="responses of a forward and backward pass")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def turns() -> Any:
    """A callback that waits for its turn before each update, and times it up to its log line."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        start = 0.0

        def on_train_begin(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
            self.wait(control)

        def on_log(self, _arguments: Any, _state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "completions/mean_length" in logs:
                seconds = time.perf_counter() - self.start
                answer = {"seconds": seconds, "mean_length": float(logs["completions/mean_length"])}
                print(MARK + json.dumps(answer), flush=True)
                self.wait(control)

        def wait(self, control: Any) -> None:
            control.should_training_stop = not sys.stdin.readline()
            self.start = time.perf_counter()

    return Turns()


def reward(vocab: int) -> Callable[..., list[float]]:
    """1 for a last number up to half the vocabulary, else 0."""

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [float(int(text.rpartition("{")[2].rstrip("}")) <= vocab // 2) for text in completions]

    return rewards


def main() -> None:
    arguments = read_arguments()

    import torch
    from datasets import Dataset
    from transformers import AutoConfig
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    config = GRPOConfig(
        output_dir=arguments.out,
        use_cpu=True,
        bf16=arguments.bf16,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.responses // arguments.micro_batch,
        num_generations=arguments.group_size,
        max_completion_length=arguments.response,
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch",
        gradient_checkpointing=arguments.checkpointing,
        max_steps=MAX_UPDATES,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=reward(AutoConfig.from_pretrained(arguments.model).vocab_size),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["question"]} for row in rows]),
        callbacks=[turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
