"""What a DeepSpeed learner writes and reads: the engine's own shards, a Hugging Face folder, and the reference.

    zero/               the engine's state, a file or two a rank
    model/              the policy as an ordinary Hugging Face folder, for anything else that reads models
    reference.safetensors   the reference, where it is not the policy itself
    learner.json        what the shards fit

Shards fit the number of ranks that wrote them. On another number they go through DeepSpeed's universal checkpoint:
parameters and optimizer state are then the same numbers, but sums over ranks have another order, so that training goes
on within float32 rounding rather than bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from grpo_lab.config import ConfigError, LearnerConfig
from grpo_lab.distributed import World
from grpo_lab.learner import gathering
from grpo_lab.learner.passes import MODEL_FOLDER
from grpo_lab.learner.zero_engine import quiet

ZERO_FOLDER, TAG = "zero", "state"
REFERENCE_FILE = "reference.safetensors"
FACTS_FILE = "learner.json"
# Beside the checkpoint, where all nodes see it; the name of what a killed run leaves and the next one tidies up.
_CONVERTED = ".saving_universal_"


def save(
    folder: Path,
    *,
    engine: Any,
    model: Any,
    tokenizer: Any,
    reference: nn.Module | None,
    settings: LearnerConfig,
    world: World,
) -> None:
    """Write everything, on every rank. `reference`: None where it is the policy. All is there when this returns."""
    engine.save_checkpoint(str(folder / ZERO_FOLDER), tag=TAG, save_latest=False)
    values = _collect(model, world)
    if world.is_leader:
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
        model.save_pretrained(folder / MODEL_FOLDER, state_dict=buffers | values)
        tokenizer.save_pretrained(folder / MODEL_FOLDER)
    if reference is not None:
        _save_reference(folder / REFERENCE_FILE, reference, world)
    if world.is_leader:
        facts = {**_facts(settings), "ranks": world.size, "reference_is_current": reference is None}
        (folder / FACTS_FILE).write_text(json.dumps(facts))
    world.barrier()


def load(
    folder: Path, *, engine: Any, policy: nn.Module, reference: nn.Module | None, settings: LearnerConfig, world: World
) -> bool:
    """Go on from what `save` wrote. Returns whether the reference is the policy.

    Raises:
        ConfigError: another engine wrote it, or this one with settings that its shards do not fit.
    """
    facts = _read_facts(folder, settings)
    if facts["ranks"] == world.size or settings.zero_stage == 0:
        _load_shards(engine, folder / ZERO_FOLDER)
    else:
        _load_for_other_ranks(engine, folder, world)
    if reference is not None:
        if facts["reference_is_current"]:
            gathering.copy_parameters(policy, reference)
        else:
            _load_reference(folder / REFERENCE_FILE, reference)
    return bool(facts["reference_is_current"])


def _facts(settings: LearnerConfig) -> dict[str, Any]:
    return {
        "zero_stage": settings.zero_stage,
        "precision": settings.precision,
        "offload_optimizer": settings.offload_optimizer,
    }


def _read_facts(folder: Path, settings: LearnerConfig) -> dict[str, Any]:
    path = folder / FACTS_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} was not saved by learner.engine=deepspeed: set learner.engine to the one that saved it"
        )
    facts: dict[str, Any] = json.loads(path.read_text())
    for key, value in _facts(settings).items():
        if facts[key] != value:
            raise ConfigError(
                f"{folder} was saved with learner.{key}={json.dumps(facts[key]).strip(chr(34))}, which its shards are "
                f"cut for: go on with that"
            )
    return facts


def _load_shards(engine: Any, folder: Path, tag: str = TAG) -> None:
    with quiet():
        path, _ = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise ConfigError(f"the engine's state in {folder / tag} cannot be read")


# --- another number of ranks ------------------------------------------------------------------------------------


def _load_for_other_ranks(engine: Any, folder: Path, world: World) -> None:
    temporary = Path(world.lead(lambda: tempfile.mkdtemp(prefix=_CONVERTED, dir=folder.parent)))
    try:
        world.lead(lambda: _convert(folder / ZERO_FOLDER / TAG, temporary / TAG))
        # Asked for when an engine is built, and read when it loads.
        engine._config.load_universal_checkpoint = True
        _load_shards(engine, temporary)
        engine._config.load_universal_checkpoint = False
        world.barrier()
    finally:
        if world.is_leader:
            shutil.rmtree(temporary, ignore_errors=True)


def _convert(shards: Path, output: Path) -> None:
    """Shards to one file a parameter."""
    from deepspeed.checkpoint.ds_to_universal import main

    arguments = Namespace(
        input_folder=str(shards),
        output_folder=str(output),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    # Its progress bars go there.
    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)


# --- whole models -----------------------------------------------------------------------------------------------


def _collect(model: nn.Module, world: World) -> dict[str, Tensor]:
    """All parameters, tied ones once, on the leader's CPU; the others take part and get nothing."""
    names = {name for name, _ in model.named_parameters()}
    values: dict[str, Tensor] = {}
    for name, tensor in gathering.weights(model):
        if world.is_leader and name in names:
            values[name] = tensor.to("cpu", copy=True)
    return values


def _save_reference(path: Path, reference: nn.Module, world: World) -> None:
    from safetensors.torch import save_file

    values = _collect(reference, world)
    if world.is_leader:
        save_file(values, path)


def _load_reference(path: Path, reference: nn.Module) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        gathering.set_parameters(reference, file.get_tensor)
