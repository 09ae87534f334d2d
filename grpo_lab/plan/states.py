"""What a learner holds between and around updates: parameters, gradients, optimizer, reference, and what the update
itself takes. By ZeRO stage, in bytes a rank.

As torch_local.py, zero_engine.py and DeepSpeed 0.19 hold them, N the parameters and R the ranks:

    torch_local      parameters, gradients, Adam's two moments and the reference in FP32: 4 N, 4 N, 8 N, 4 N
    ZeRO, FP32       as above; from stage 1 on a further master copy, as DeepSpeed keeps one in any precision
    ZeRO, BF16       parameters and reference 2 N, gradient sums 4 N, master and moments 12 N (stage 0: as FP32, under
                     autocast)
    divided by R     master and moments from stage 1 on, gradient sums from 2 on, parameters and reference at 3
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_lab.config import LearnerConfig
from grpo_lab.plan.shape import Shape, embedding_parameters, parameters

STAGES = (0, 1, 2, 3)
# As in zero_engine.py: elements of gradients that are summed at a time.
BUCKET = 50_000_000
# DeepSpeed's stage3_max_reuse_distance: parameters used again within so many elements stay gathered. Forward and
# backward meet at the loss, so that the last half of it stays.
REUSE_DISTANCE = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one rank. Those in `host_*` lie in CPU memory by offloading.

    gathered: parameters whole for the pass at hand (stage 3). buffers: where gradients are summed over ranks.
    update: temporary tensors of the optimizer's step. load: what stands beside the parameters while the engine starts.
    """

    parameters: int
    gradients: int
    optimizer: int
    reference: int
    gathered: int = 0
    buffers: int = 0
    update: int = 0
    load: int = 0
    host_parameters: int = 0
    host_optimizer: int = 0


def parameter_width(learner: LearnerConfig, stage: int) -> int:
    """Bytes of a parameter of the policy on the device."""
    return 2 if learner.engine == "deepspeed" and learner.precision == "bf16" and stage > 0 else 4


def states(shape: Shape, learner: LearnerConfig, *, stage: int, ranks: int, reference: bool, on_gpu: bool) -> States:
    """A rank's states at a ZeRO stage (0 is also the embedded learner's)."""
    count, width = parameters(shape), parameter_width(learner, stage)
    if stage == 0:
        # The embedded learner's fused AdamW has no temporary tensors. Otherwise torch updates all parameters at once on
        # a GPU, with the square roots of all second moments beside them, and on a CPU one by one, with two temporary
        # tensors of the largest.
        update = 4 * count if on_gpu else 8 * embedding_parameters(shape)
        if learner.engine == "torch_local":
            update = 0
        summed = 4 * min(count, BUCKET) if learner.engine == "deepspeed" and ranks > 1 else 0
        return States(
            parameters=4 * count,
            gradients=4 * count,
            optimizer=8 * count,
            reference=4 * count if reference else 0,
            buffers=summed,
            update=update,
        )
    share = -(-count // ranks)
    whole = stage < 3
    # The master copy is one flat tensor: its update has two temporary ones of its size on a CPU, one on a GPU.
    update = 4 * share if on_gpu else 8 * share
    if width == 4 or stage == 1:
        # The gradients are flattened into one tensor beside the sums.
        update = max(update, 4 * share)
    held_parameters = width * (count if whole else share)
    offloaded = learner.offload_parameters and not whole
    optimizer = 12 * share
    gradients = 4 * (count if stage == 1 else share)
    return States(
        parameters=0 if offloaded else held_parameters,
        gradients=0 if learner.offload_optimizer and stage > 1 else gradients,
        optimizer=0 if learner.offload_optimizer else optimizer,
        reference=held_parameters if reference and not offloaded else 0,
        gathered=0 if whole else width * min(count, REUSE_DISTANCE // 2 + BUCKET),
        buffers=_buffers(min(count, BUCKET), ranks, scattered=not whole, on_gpu=on_gpu),
        update=0 if learner.offload_optimizer else update,
        # Stages 1 and 2 copy the parameters into one flat tensor.
        load=held_parameters if whole else 0,
        host_parameters=held_parameters * (2 if reference else 1) if offloaded else 0,
        # Master, moments, gradients, and the parameters on their way back.
        host_optimizer=optimizer + (4 + width) * share if learner.offload_optimizer else 0,
    )


def _buffers(bucket: int, ranks: int, *, scattered: bool, on_gpu: bool) -> int:
    """Bytes of summing `bucket` gradients over ranks: the bucket and its flattened copy, together 8 bytes a gradient in
    each precision. Where the sum is scattered (stage 3), a rank's part of it as well, and gloo works on one more copy.
    """
    held = 8 * bucket
    if scattered:
        held += 4 * -(-bucket // ranks) + (0 if on_gpu else 4 * bucket)
    return held
