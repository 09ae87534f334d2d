"""Memory: states by hand, activations against what autograd keeps of a real model, and every preset."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from run_config import run_config
from tiny import learner_settings, minibatch_of, random_groups, tiny_model

from grpo_lab.composition import conf_dir
from grpo_lab.learner import zero_engine
from grpo_lab.minibatches import micro_batches, pack, plan_rows
from grpo_lab.plan import sampler as sampler_module
from grpo_lab.plan import states as states_module
from grpo_lab.plan.activations import AUTOCAST, BF16, FP32, MicroBatch, activations, layer_bytes, micro_batch
from grpo_lab.plan.memory import GIB, Memory, memory
from grpo_lab.plan.sampler import sampler
from grpo_lab.plan.shape import Shape, parameters, shape_of
from grpo_lab.plan.states import states
from grpo_lab.plan.volume import lengths_of
from grpo_lab.policy import Policy, checkpoint_activations
from grpo_lab.rollout import cache
from grpo_lab.rollout.vllm.settings import model_length
from grpo_lab.validation import validate

# 210 parameters in the input matrix, 2 x 710 in the layers, 10 in the last norm: 1640, which four ranks share evenly.
SHAPE = Shape(hidden=10, layers=2, heads=2, kv_heads=1, head_dim=5, intermediate=13, vocab=21, tied=True)


def planned(*overrides: str, gpu_gib: float | None = None) -> Memory:
    config = run_config(*overrides)
    validate(config)
    lengths = lengths_of(config, prompt=None, response=None)
    return memory(shape_of(config), config, lengths, gpu_gib=gpu_gib)


# --- states -----------------------------------------------------------------------------------------------------


def test_states_of_the_embedded_learner() -> None:
    count = parameters(SHAPE)
    held = states(SHAPE, learner_settings(), stage=0, ranks=1, reference=True, on_gpu=False)
    assert (held.parameters, held.gradients, held.optimizer, held.reference) == (
        4 * count,
        4 * count,
        8 * count,
        4 * count,
    )
    assert held.parameters + held.optimizer + held.reference == 16 * count
    assert held.buffers == held.gathered == held.load == 0
    assert held.update == 0
    assert states(SHAPE, learner_settings(), stage=0, ranks=1, reference=False, on_gpu=True).reference == 0


def test_temporaries_of_an_update_without_sharding() -> None:
    settings = learner_settings(engine="deepspeed")
    # Two of the input matrix on a CPU; on a GPU one of all parameters.
    assert states(SHAPE, settings, stage=0, ranks=2, reference=True, on_gpu=False).update == 8 * 210
    assert states(SHAPE, settings, stage=0, ranks=2, reference=True, on_gpu=True).update == 4 * parameters(SHAPE)


@pytest.mark.parametrize(
    ("stage", "parameter", "gradient", "optimizer", "reference"),
    [(0, 4, 4, 8, 4), (1, 2, 4, 3, 2), (2, 2, 1, 3, 2), (3, 0.5, 1, 3, 0.5)],
)
def test_states_in_bf16_over_four_ranks(
    stage: int, parameter: float, gradient: float, optimizer: float, reference: float
) -> None:
    """Bytes a parameter and rank, where a stage divides by four what it shards."""
    count = parameters(SHAPE)
    assert count == 1640
    settings = learner_settings(engine="deepspeed", precision="bf16", zero_stage=stage)
    held = states(SHAPE, settings, stage=stage, ranks=4, reference=True, on_gpu=True)
    assert held.parameters == parameter * count
    assert held.gradients == gradient * count
    assert held.optimizer == optimizer * count
    assert held.reference == reference * count
    assert held.gathered == (2 * count if stage == 3 else 0)


def test_fp32_has_a_master_copy_from_stage_one_on() -> None:
    count = parameters(SHAPE)
    settings = learner_settings(engine="deepspeed")
    held = states(SHAPE, settings, stage=2, ranks=2, reference=False, on_gpu=False)
    assert (held.parameters, held.gradients, held.optimizer) == (4 * count, 2 * count, 6 * count)
    assert held.load == 4 * count
    assert held.buffers == 8 * count


def test_offloading_moves_states_to_the_cpu() -> None:
    count = parameters(SHAPE)
    settings = learner_settings(
        engine="deepspeed", precision="bf16", zero_stage=3, offload_optimizer=True, offload_parameters=True
    )
    held = states(SHAPE, settings, stage=3, ranks=4, reference=True, on_gpu=True)
    assert held.parameters == held.optimizer == held.reference == held.gradients == held.update == 0
    # Policy and reference.
    assert held.host_parameters == 2 * count // 2
    # Master and moments 12, gradients 4, and 2 for what goes back, over four ranks.
    assert held.host_optimizer == 18 * count // 4


# --- activations ------------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
}
WIDE_SHAPE = Shape(
    hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, intermediate=160, vocab=15, tied=True, qk_norm=True
)


def saved_bytes(policy: Policy, batch: Any) -> int:
    """Bytes that autograd keeps of a forward pass, each storage once, parameters left out."""
    own = {each.untyped_storage().data_ptr() for each in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept.setdefault(place, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(batch)
    return sum(each.untyped_storage().nbytes() for each in kept.values())


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("kind", [FP32, AUTOCAST, BF16])
def test_activations_are_what_autograd_keeps(architecture: str, kind: str) -> None:
    model = tiny_model(architecture, **WIDE)
    if kind == BF16:
        model = model.bfloat16()
    policy = Policy(model, temperature=1.0, logit_chunk=64, autocast=torch.bfloat16 if kind == AUTOCAST else None)
    # Prompts of unlike length, so that every response has a mask of its own.
    minibatch = minibatch_of(random_groups([(20, [50] * 4), (19, [50] * 4), (21, [50] * 4)]))
    batch = pack(minibatch, plan_rows(minibatch, budget=1000))
    shape = replace(WIDE_SHAPE, qk_norm=architecture == "qwen3")
    settings = learner_settings(
        precision="fp32" if kind == FP32 else "bf16", engine="deepspeed" if kind == BF16 else "torch_local"
    )
    planned = activations(
        shape,
        settings,
        MicroBatch(rows=3, members=4, prompt=20, response=49, tokens=600, passes=1, busy=1),
        stage=1 if kind == BF16 else 0,
        temperature=1.0,
    )
    assert planned.saved == pytest.approx(saved_bytes(policy, batch), rel=0.03)


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    model = tiny_model("qwen3", **WIDE)
    checkpoint_activations(model)
    policy = Policy(model, temperature=1.0, logit_chunk=64, autocast=None)
    minibatch = minibatch_of(random_groups([(20, [50] * 4)] * 3))
    batch = MicroBatch(rows=3, members=4, prompt=20, response=49, tokens=600, passes=1, busy=1)
    settings = learner_settings(activation_checkpointing=True)
    planned = activations(WIDE_SHAPE, settings, batch, stage=0, temperature=1.0)
    one_layer = batch.positions * layer_bytes(WIDE_SHAPE, FP32) + 4 * (2 * 64 * batch.keys + batch.pairs)
    # What attention reads beside its inputs lies in no graph: keys, places and mask.
    beside = 8 * batch.keys + batch.pairs + batch.positions * (16 + 2 * 32 * 4)
    kept = saved_bytes(policy, pack(minibatch, plan_rows(minibatch, budget=1000)))
    assert planned.saved - one_layer - beside == pytest.approx(kept, rel=0.03)


def test_temporaries_of_the_output_matrix() -> None:
    shape = replace(SHAPE, vocab=100)
    batch = MicroBatch(rows=1, members=2, prompt=3, response=4, tokens=10, passes=1, busy=1)
    # One chunk: 12 bytes a logit beside the matrix's gradient of 4 x 100 x 10.
    assert _logits(shape, batch, logit_chunk=16) == 4000 + 12 * 10 * 100
    # Two chunks, of which the one before is still there; and a quotient by the temperature.
    assert _logits(shape, batch, logit_chunk=5) == 4000 + 20 * 5 * 100
    assert _logits(shape, batch, logit_chunk=5, temperature=0.7) == 4000 + 24 * 5 * 100


def _logits(shape: Shape, batch: MicroBatch, *, temperature: float = 1.0, **settings: Any) -> int:
    return activations(shape, learner_settings(**settings), batch, stage=0, temperature=temperature).logits


@pytest.mark.parametrize(("prompt", "response"), [(8, 18), (32, 32), (20, 1)])
@pytest.mark.parametrize(("budget", "ranks"), [(2048, 1), (100, 1), (2048, 2)])
def test_micro_batches_are_those_of_a_minibatch_of_equal_responses(
    prompt: int, response: int, budget: int, ranks: int
) -> None:
    config = run_config(
        f"learner.micro_batch_tokens={budget}", *([] if ranks == 1 else ["hardware=cpu_2rank"]), "rollout.max_rows=64"
    )
    planned = micro_batch(config, lengths_of(config, prompt=prompt, response=response))
    groups = random_groups([(prompt, [response] * config.group_size)] * (config.groups_per_minibatch // ranks))
    real = micro_batches(plan_rows(minibatch_of(groups), budget=budget), budget=budget)
    assert planned.rows == max(len(rows) for rows in real)
    assert planned.passes == pytest.approx(len(real), abs=1)
    if planned.members == config.group_size:
        assert planned.passes == len(real)
        assert planned.length == real[0][0].length
        assert planned.tokens == planned.rows * config.group_size * response


# --- sampler ----------------------------------------------------------------------------------------------------


def sampler_of(*overrides: str, prompt: float | None = None, response: float | None = None) -> Any:
    config = run_config(*overrides)
    lengths = lengths_of(config, prompt=prompt, response=response)
    return sampler(shape_of(config), config, lengths, device_bytes=80 * GIB)


def test_the_embedded_sampler_by_hand() -> None:
    held = sampler_of("evaluation.every=null", prompt=8, response=18)
    # The learner's, which stand still while they are sampled from; else its own.
    assert held.weights == 0
    assert sampler_of("schedule.minibatches_per_collection=1").weights == 4 * 428_672
    assert sampler_of("schedule.overlap=true").weights == 4 * 428_672
    assert sampler_of("hardware=cpu_2rank").weights == 4 * 428_672
    assert held.kv_per_token == 2 * 2 * 4 * 32 * 4
    # 256 prompts of 8 tokens, and for each of 2,048 responses 17 tokens and a page, in 2 x 2 x 4 heads of 128 bytes.
    assert held.cache == 16 * (256 * 8 * 128 + 2048 * (17 * 128 + 4096))
    assert held.sequences is None


def test_rows_are_bounded_and_dealt_to_ranks() -> None:
    whole = sampler_of("evaluation.every=null", prompt=8, response=18)
    assert sampler_of("evaluation.every=null", "rollout.max_rows=1024", prompt=8, response=18).cache == whole.cache / 2
    assert sampler_of("evaluation.every=null", "hardware=cpu_2rank", prompt=8, response=18).cache == whole.cache / 2


def test_an_evaluation_may_ask_for_more_than_training() -> None:
    training = sampler_of("evaluation.every=null", "collection.prompts_per_batch=16", prompt=8, response=18)
    evaluating = sampler_of("collection.prompts_per_batch=16", "evaluation.problems=32", prompt=8, response=18)
    assert evaluating.cache == 2 * training.cache


def test_sequences_that_fit_in_vllms_cache() -> None:
    paper = ("scale=paper", "hardware=8gpu_server")
    held = sampler_of(*paper)
    # Of 0.9 x 80 GiB the weights in BF16; the rest in tokens of 2 x 28 x 8 x 128 x 2 bytes, 4096 a sequence.
    cache = round(0.9 * 80 * GIB) - 2 * 1_720_574_976
    assert held.cache == cache
    assert held.kv_per_token == 114_688
    assert held.sequences == cache // (114_688 * 4096)
    assert sampler_of(*paper, "rollout.vllm.kv_cache_gb=10").cache == 10 * GIB
    # Four parts of one engine have a quarter of the heads each; eight parts of four heads hold each twice.
    four = sampler_of("scale=paper", "hardware=8gpu_colocate_tp4", "model=qwen2_5_7b")
    eight = sampler_of(
        "scale=paper", "hardware=8gpu_colocate_tp4", "model=qwen2_5_7b", "rollout.vllm.tensor_parallel=8"
    )
    assert four.sequences == four.cache // (57_344 // 4 * 4096)
    assert eight.sequences == eight.cache // (57_344 // 4 * 4096)


@pytest.mark.parametrize(
    ("overrides", "where", "beside"),
    [
        (["hardware=8gpu_server"], "own", False),
        (["hardware=8gpu_server", "rollout.vllm.devices=null"], "first", True),
        (["hardware=8gpu_server", "rollout.url=http://host:1"], "elsewhere", False),
        (["hardware=8gpu_colocate_tp4"], "ranks", False),
        (["hardware=8gpu_colocate_tp4", "rollout.vllm.sleep=false"], "ranks", True),
    ],
)
def test_where_the_sampler_is_while_the_learner_learns(overrides: list[str], where: str, beside: bool) -> None:
    held = planned("scale=paper", *overrides)
    assert held.sampler.where == where
    assert (held.phases["learn"]["sampler"] > 0) == beside
    assert (held.phases["sample"]["sampler"] > 0) == (where in ("ranks", "first"))


# --- whole plans ------------------------------------------------------------------------------------------------

MODELS = ("qwen3_1_7b_base", "qwen3_4b_base", "qwen2_5_7b")


@pytest.mark.parametrize(("model", "hardware"), [*product(MODELS, ("8gpu_server", "8gpu_colocate_tp4"))])
def test_the_papers_settings_fit_eight_gpus_of_80_gib(model: str, hardware: str) -> None:
    held = planned("scale=paper", f"model={model}", f"hardware={hardware}", "objective=ggpo")
    assert held.on_gpu
    assert held.fits
    stages = {row.stage: row for row in held.by_stage}
    assert [row.stage for row in held.by_stage if row.configured] == [2 if hardware == "8gpu_server" else 3]
    # What a stage shards is a share of what the stage before holds.
    ranks = 7 if hardware == "8gpu_server" else 8
    assert stages[2].gradients == pytest.approx(stages[1].gradients / ranks, rel=1e-6)
    assert stages[3].parameters == pytest.approx(stages[2].parameters / ranks, rel=1e-6)
    assert stages[1].optimizer == pytest.approx(stages[0].optimizer * 12 / 8 / ranks, rel=1e-6)


def test_a_model_too_large_for_its_gpus_is_told() -> None:
    assert not planned("scale=paper", "model=qwen2_5_7b", "hardware=8gpu_server", gpu_gib=24).fits


def test_sharding_over_64_and_512_gpus() -> None:
    """On paper: what is sharded falls as ranks grow; what a rank works on does not."""
    overrides = ("scale=paper", "model=qwen2_5_7b", "hardware=2node", "groups_per_minibatch=512")
    count = parameters(shape_of(run_config(*overrides)))
    parts = {}
    for ranks in (16, 64, 512):
        held = planned(*overrides, f"hardware.ranks={ranks}", f"hardware.nodes={ranks // 8}")
        learn = parts[ranks] = held.phases["learn"]
        assert learn["optimizer"] == 12 * -(-count // ranks)
        assert learn["parameters"] == learn["reference"] == 2 * -(-count // ranks)
        assert held.processes == 8
        assert held.fits
    totals = {ranks: sum(learn.values()) for ranks, learn in parts.items()}
    assert totals[16] > totals[64] > totals[512]
    assert parts[16]["activations"] == parts[64]["activations"] == parts[512]["activations"]


def test_cpu_memory_of_a_node() -> None:
    held = planned("scale=paper", "model=qwen2_5_7b", "hardware=2node", "schedule=rg_off_policy")
    count = 7_615_616_512
    assert held.host["while loading"] == 8 * 2 * 2 * count
    # v=10 with a fresh batch for each: the sampler's weights are kept, in the learner's type.
    assert held.host["behaviour weights"] == 2 * count
    assert held.host["sampler asleep"] == 8 * 2 * -(-count // 4)
    assert planned().host == {}


def groups(name: str) -> list[str]:
    return [path.stem for path in sorted((conf_dir() / name).glob("*.yaml"))]


EXPERIMENTS = conf_dir() / "experiment"


@pytest.mark.parametrize(
    "experiment",
    [
        name
        for path in sorted(EXPERIMENTS.rglob("*.yaml"))
        # The papers' defaults are no experiments; runs from a pool have no plan.
        if (name := str(path.relative_to(EXPERIMENTS).with_suffix(""))).split("/")[-1]
        not in ("default", "table5", "fig4")
    ],
)
def test_every_experiment_is_planned(experiment: str) -> None:
    assert planned(f"experiment={experiment}").peak > 0


@pytest.mark.parametrize(
    ("model", "hardware"),
    [
        *product(groups("model"), ["cpu", "8gpu_server"]),
        *product(["tiny"], groups("hardware")),
        *product(["qwen3_4b_base"], groups("hardware")),
    ],
)
def test_every_model_and_every_hardware_is_planned(model: str, hardware: str) -> None:
    task = "arithmetic" if model in ("tiny", "tiny_large") else "gsm8k"
    held = planned(f"model={model}", f"hardware={hardware}", f"dataset={task}", "evaluation.every=null")
    assert held.peak == max(sum(parts.values()) for parts in held.phases.values()) > 0
    assert held.on_gpu == (not hardware.startswith("cpu"))


def test_what_plans_repeat_of_engines_is_as_there() -> None:
    """Their modules load what learns and samples, which a plan does not."""
    assert states_module.BUCKET == zero_engine.BUCKET
    assert sampler_module.ROOM == cache.ROOM
    for overrides in ([], ["evaluation.max_tokens=100"], ["evaluation.max_tokens=100", "evaluation.every=null"]):
        config = run_config("hardware=cpu_vllm", "rollout.vllm.kv_cache_gb=1", *overrides)
        assert sampler_module.longest_sequence(config) == model_length(config)
