"""How a process that trains, samples or evaluates is set up: threads, device, and what a stop does to it."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

from grpo_lab.config import ConfigError, TrainConfig
from grpo_lab.launch import place_from_environment

if TYPE_CHECKING:
    from grpo_lab.distributed import World


def set_threads(config: TrainConfig) -> None:
    """What libraries read when they are loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Turns of spinning, about a tenth of a millisecond, before a waiting thread sleeps: longer than between two
        # operations of a pass, since waking costs more than most of them; not for good, on a machine that others use.
        os.environ.setdefault("GOMP_SPINCOUNT", "100000")
    # torchrun sets 1 of its own accord.
    if place_from_environment() is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.hardware.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.hardware.threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.hardware.device == "cpu":
        # Where DeepSpeed is installed it looks for an accelerator whenever a library imports it, and prints about it.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def set_up_process(config: TrainConfig, world: World) -> None:
    """Threads and device as configured, and SIGTERM (a scheduler's notice) as an interruption that ends tidily.

    Raises:
        ConfigError: there is no such device.
    """
    import torch
    import transformers

    from grpo_lab.distributed import device_of

    torch.set_num_threads(config.hardware.threads)
    if config.hardware.device != "cpu":
        if not torch.cuda.is_available():
            raise ConfigError(f"hardware.device={config.hardware.device}: torch sees no GPU here; choose hardware=cpu")
        torch.cuda.set_device(device_of(config.hardware, world))
    # Bars for reading and writing weights would tear the live view.
    transformers.utils.logging.disable_progress_bar()

    stopping = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        if stopping and number == signal.SIGTERM:
            # Not in the midst of the tidy end.
            return
        stopping = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
