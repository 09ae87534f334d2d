"""Rules that span keys: each gives one line with the key, the value and the fix."""

from __future__ import annotations

import pytest
from run_config import run_config

from grpo_lab.config import (
    ConfigError,
)
from grpo_lab.validation import AT_LEAST_ONE, CHOICES, validate


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(run_config(*overrides))
    return str(caught.value).splitlines()


# --- one line each ----------------------------------------------------------------------------------------------

RULES: list[tuple[list[str], str]] = [
    (["learner.lr=-1e-6"], "learner.lr=-1e-06 must be a number from 0"),
    (["learner.lr=nan"], "learner.lr=nan must be a number from 0"),
    (["learner.betas=[0.9]"], "learner.betas=[0.9] must be two numbers in [0, 1)"),
    (["learner.betas=[0.9,1.0]"], "learner.betas=[0.9, 1.0] must be two numbers in [0, 1)"),
    (["learner.grad_clip=0"], "learner.grad_clip=0.0 must be above 0 (.inf for none)"),
    (["learner.weight_decay=-0.1"], "learner.weight_decay=-0.1 must be a number of at least 0"),
    (["learner.weight_decay=nan"], "learner.weight_decay=nan must be a number of at least 0"),
    (["objective.dual_clip=inf"], "objective.dual_clip=inf must be a number above 1 + objective.eps_high"),
    (["learner.warmup_updates=-1"], "learner.warmup_updates=-1 must be at least 0"),
    (["seed=-1"], "seed=-1 must lie in 0 .. 2^32 - 1"),
    (["seed=4294967296"], "seed=4294967296 must lie in 0 .. 2^32 - 1"),
    (["verifier.timeout=0"], "verifier.timeout=0.0 must be a number of seconds above 0"),
    (["verifier.timeout=inf"], "verifier.timeout=inf must be a number of seconds above 0"),
    (
        ["dataset.held_out=0.5"],
        "dataset.held_out=0.5 has no effect on arithmetic, which is made here, in a split of its",
    ),
    (["dataset.on_error=skip"], "dataset.on_error=skip has no effect on arithmetic, which is made here"),
    (["dataset.template=Solve:"], "dataset.template='Solve:' must hold {question}"),
    (["hardware.device=gpu"], "hardware.device=gpu is not known: choose cpu, cuda or cuda:0"),
    (["group_size=1"], "group_size=1 must be at least 2: every objective compares the responses of a group"),
    (["rollout.temperature=0"], "rollout.temperature=0.0 must be above 0 in training (evaluation.temperature=0 is"),
    (["rollout.top_p=0.9"], "rollout.top_p=0.9 rollout.top_k=0: training samples the whole distribution"),
    (["rollout.top_k=20"], "rollout.top_p=1.0 rollout.top_k=20: training samples the whole distribution"),
    (["rollout.max_rows=7", "evaluation.every=null"], "rollout.max_rows=7 must hold one group of group_size=8"),
    (
        ["rollout.max_rows=8", "evaluation.n=9"],
        "rollout.max_rows=8 must hold the evaluation.n=9 responses of a problem",
    ),
    (["evaluation.k=[1,9]"], "evaluation.k=[1, 9] must name values from 1 to evaluation.n=8"),
    (["evaluation.k=[]"], "evaluation.k=[] must name values from 1 to evaluation.n=8"),
    (["evaluation.temperature=-1"], "evaluation.temperature=-1.0 must be at least 0"),
    (["evaluation.top_p=0"], "evaluation.top_p=0.0 must lie in (0, 1]"),
    (["hardware.ranks=2"], "hardware.ranks=2 needs learner.engine=deepspeed: torch_local is one process"),
    (["hardware=cpu_2rank", "hardware.nodes=4"], "hardware.ranks=2 must be a multiple of hardware.nodes=4"),
    (["hardware.first_gpu=-1"], "hardware.first_gpu=-1 must be at least 0"),
    (["hardware=cpu_2rank", "learner.zero_stage=4"], "learner.zero_stage=4 is not known: choose 0, 1, 2 or 3"),
    (["learner.zero_stage=2"], "learner.zero_stage=2 needs learner.engine=deepspeed: torch_local shards and"),
    (["learner.offload_optimizer=true"], "learner.offload_optimizer=True needs learner.engine=deepspeed"),
    (
        ["hardware=8gpu_server", "hardware.device=cuda:1"],
        "hardware.device=cuda:1 is one GPU, and hardware.ranks=7: choose cuda",
    ),
    (
        ["hardware=cpu_2rank", "learner.zero_stage=0", "learner.offload_optimizer=true"],
        "learner.offload_optimizer=true needs learner.zero_stage=1, 2 or 3",
    ),
    (
        ["hardware=cpu_2rank", "learner.offload_parameters=true"],
        "learner.offload_parameters=true needs learner.zero_stage=3 (it is 2)",
    ),
    (["rollout.url=http://a:1"], "rollout.url=http://a:1 needs rollout.engine=vllm and rollout.vllm.mode=server"),
    (
        ["hardware=cpu_vllm", "rollout.url=http://a:1"],
        "rollout.url=http://a:1 is a server's: set rollout.vllm.mode=server (it is worker)",
    ),
    (
        ["hardware=cpu_vllm", "rollout.vllm.mode=server", "rollout.url=a:1"],
        "rollout.url=a:1 must start with http:// or https://",
    ),
    (["hardware=cpu_vllm", "rollout.vllm.memory_share=1.5"], "rollout.vllm.memory_share=1.5 must lie in (0, 1]"),
    (["hardware=cpu_vllm", "rollout.vllm.sync_timeout=0"], "rollout.vllm.sync_timeout=0.0 must be above 0 seconds"),
    (["hardware=cpu_vllm", "rollout.vllm.restarts=-1"], "rollout.vllm.restarts=-1 must be at least 0"),
    (
        ["hardware=cpu_vllm", "rollout.vllm.sleep=true"],
        "rollout.vllm.sleep=true needs rollout.vllm.mode=in_process on a GPU (mode is worker, hardware.device=cpu)",
    ),
    (
        ["schedule.overlap=true", "hardware=cpu_2rank"],
        "schedule.overlap=true needs a sampler apart from the learner: with rollout.engine=hf all hardware.ranks=2",
    ),
    (
        ["schedule.overlap=true", "hardware=8gpu_colocate_tp4"],
        "schedule.overlap=true needs a sampler apart from the learner, and rollout.vllm.mode=in_process shares its",
    ),
    (
        ["hardware=cpu_vllm_2rank", "rollout.vllm.mode=in_process", "hardware.ranks=1"],
        "rollout.vllm.mode=in_process shares the process group of learner.engine=deepspeed, which takes hardware.ranks",
    ),
    (
        ["hardware=1gpu", "hardware.device=cuda:1"],
        "rollout.vllm.mode=in_process takes the first GPUs that the process sees (hardware.device=cuda:1",
    ),
    (
        ["hardware=8gpu_colocate_tp4", "rollout.vllm.tensor_parallel=3"],
        "rollout.vllm.tensor_parallel=3 must divide hardware.ranks=8: in process, each rank is a part of one engine",
    ),
    (
        ["learner.micro_batch_tokens=63"],
        "learner.micro_batch_tokens=63 must hold one prompt and one response: rollout.max_prompt_tokens + "
        "rollout.max_response_tokens = 64",
    ),
    (["objective=agro", "objective.beta=0"], "objective.beta=0.0 must be above 0 for agro"),
    (["objective=ggpo", "objective.beta=-1"], "objective.beta=-1.0 must be above 0 for ggpo"),
    (["objective=ggpo_clip", "objective.token_clip=0"], "objective.token_clip=0.0 must be above 0 (null for none)"),
    (
        ["objective=ggpo_clip", "objective.reward_only=true"],
        "objective.token_clip clips the log ratio, which objective.reward_only=true leaves out: drop one",
    ),
    (["objective.beta=-0.1"], "objective.beta=-0.1 must be at least 0"),
    (["objective.eps_low=1.5"], "objective.eps_low=1.5 objective.eps_high=0.2: eps_low lies in [0, 1]"),
    (["objective.eps_high=-0.1"], "objective.eps_low=0.2 objective.eps_high=-0.1: eps_low lies in [0, 1], eps_high is"),
    (["objective.dual_clip=1.2"], "objective.dual_clip=1.2 must be a number above 1 + objective.eps_high = 1.2 ("),
    (
        ["objective.clip_center=pi_k"],
        "objective.clip_center=pi_k is RG's Eq. 6, which has no dual clip: set objective.d",
    ),
    (["objective.tis_block=8"], "objective.tis_block=8 and objective.tis_cap=None go together: set both or neither"),
    (["objective.tis_cap=2"], "objective.tis_block=None and objective.tis_cap=2.0 go together: set both or neither"),
    (["objective=grpo_tis", "objective.tis_block=0"], "objective.tis_block=0 must be at least 1"),
    (["objective=grpo_tis", "objective.tis_cap=0"], "objective.tis_cap=0.0 must be above 0 (.inf for plain importance"),
    (
        ["objective=grpo_tis", "objective.clip_center=pi_k", "objective.dual_clip=null"],
        "objective.tis_block divides by pi_old, so objective.clip_center must be one",
    ),
    (["source=pool"], "source=pool needs pool.path=<folder>, which python -m grpo_lab.pool out=<folder> makes"),
    (["pool.path=p"], "pool.path=p is read with source=pool alone: add it, or leave pool.path out"),
    (
        ["source=pool", "pool.path=p", "schedule.overlap=true"],
        "schedule.overlap=true samples beside learning, and source=pool samples nothing: drop one",
    ),
    (
        ["source=pool", "pool.path=p", "schedule.epochs=2"],
        "schedule.epochs=2 counts passes over prompts, and source=pool uses each group of the pool once: set schedule.",
    ),
    (
        ["source=pool", "pool.path=p", "schedule.t_ref=epoch"],
        "schedule.t_ref=epoch waits for a pass over the prompts, which source=pool has not: set a number or null",
    ),
    (
        ["schedule.minibatches_per_collection=3"],
        "schedule.minibatches_per_collection=3 must divide schedule.v=8: a collection is sampled by one set of weights",
    ),
    (["schedule.minibatches_per_collection=w"], "schedule.minibatches_per_collection=w must be `v` or a whole number"),
    (["schedule.t_ref=0"], "schedule.t_ref=0 must be at least 1 (null for a fixed reference)"),
    (["schedule.t_ref=often"], "schedule.t_ref=often must be a number of updates, null, `epoch` or `auto`"),
    (["schedule.updates=null"], "schedule.updates and schedule.epochs are both null: one of them is the budget"),
    (
        ["schedule.epochs=1", "learner.lr_schedule=linear"],
        "learner.lr_schedule=linear needs a budget in updates: set schedule.updates instead of schedule.epochs",
    ),
    (
        ["collection.prompts_per_batch=10", "collection.max_batches=25"],
        "collection.prompts_per_batch=10 x collection.max_batches=25 = 250 groups cannot fill a collection of 256",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), RULES, ids=[" ".join(overrides) for overrides, _ in RULES])
def test_each_rule_gives_one_clear_line(overrides: list[str], expected: str) -> None:
    lines = problems(*overrides)
    assert len(lines) == 1
    assert lines[0].startswith(expected)


def test_values_at_the_edge_of_a_rule_are_allowed() -> None:
    edges = [
        ("objective=grpo", "objective.beta=0", "objective.eps_low=1", "objective.dual_clip=null", "seed=4294967295"),
        (
            "objective=grpo_tis",
            "objective.tis_cap=inf",
            "objective.tis_block=1",
            "learner.grad_clip=inf",
            "learner.lr=0",
        ),
        ("objective=grpo_rg", "objective.clip_center=pi_k", "schedule.v=4", "schedule.minibatches_per_collection=2"),
        ("group_size=2", "rollout.max_rows=8", "learner.micro_batch_tokens=64", "evaluation.temperature=0"),
        ("evaluation.every=null", "evaluation.n=1", "rollout.max_rows=8", "evaluation.top_p=0.95"),
        ("collection.prompts_per_batch=8", "collection.max_batches=32", "hardware.device=cuda:1"),
    ]
    for overrides in edges:
        assert validate(run_config(*overrides)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("parts.1.chat=false", "dataset.parts.1.chat=False has no effect on openr1, which is part of a mixture"),
        ("parts.0.held_out=0.5", "dataset.parts.0.held_out=0.5 has no effect on guru"),
        ("test_set=null", "dataset.test_path=held.jsonl is a copy of dataset.test_set, which is null: name that set"),
    ],
)
def test_keys_that_a_mixture_does_not_read_are_refused(change: str, said: str) -> None:
    (line,) = problems("dataset=alp_math", "model=smollm2_135m", "dataset.test_path=held.jsonl", f"dataset.{change}")
    assert line.startswith(said)


def test_no_key_drops_out_of_the_tables_of_checked_ones() -> None:
    """The next two tests go through the tables, and would not miss it."""
    assert (len(CHOICES), len(AT_LEAST_ONE)) == (17, 27)


def test_words_that_are_not_known() -> None:
    """Every key that takes one of some words, all wrong at once: a line each, with the words."""
    lines = problems(*(f"{key}=nonsense" for key in CHOICES))
    for key, words in CHOICES.items():
        assert f"{key}=nonsense is not known: choose {' or '.join(words)}" in lines


def test_numbers_that_must_be_at_least_one() -> None:
    lines = problems(*(f"{key}=0" for key in AT_LEAST_ONE))
    for key in AT_LEAST_ONE:
        assert f"{key}=0 must be at least 1" in lines


def test_all_problems_are_told_at_once() -> None:
    lines = problems("schedule.v=0", "group_size=1", "objective.beta=-1")
    assert [line.partition("=")[0] for line in lines] == ["schedule.v", "group_size", "objective.beta"]


# --- warnings ---------------------------------------------------------------------------------------------------

ON = ["evaluation.checkpoints=true", "checkpoint.every=8"]
SERVED = ["hardware=8gpu_server", *ON]
LEARNER_ON_3 = ["hardware=1gpu", *ON, "hardware.device=cuda:3", "rollout.engine=hf"]
IN_USE = "training and vLLM have cuda:0, cuda:1, cuda:2, cuda:3, cuda:4, cuda:5, cuda:6, cuda:7"
HAND_OFF_RULES: list[tuple[list[str], str]] = [
    (["evaluation.hand_off=cron"], "evaluation.hand_off=cron is not known: choose inline or background or slurm"),
    (["evaluation.device=cuda"], "evaluation.device=cuda is not known: choose cpu, or one GPU such as cuda:7, or null"),
    (
        ["evaluation.checkpoints=true", "checkpoint.every=null"],
        "evaluation.checkpoints=true needs checkpoints: set checkpoint.every, which is null",
    ),
    (
        [*ON, "evaluation.every=null", "evaluation.n=4"],
        "evaluation.k=[1, 4, 8] must name values from 1 to evaluation.n=4",
    ),
    (
        [*SERVED, "evaluation.device=cpu"],
        "evaluation.device=cpu cannot run the GPU's rollout.engine=vllm: name a GPU, such as cuda:7",
    ),
    # vLLM's server keeps its GPU's memory while an inline evaluation goes on.
    (SERVED, "evaluation.checkpoints=true with evaluation.hand_off=inline needs a GPU that neither training nor vLLM"),
    ([*SERVED, "evaluation.device=cuda:0"], f"evaluation.device=cuda:0 is in use: {IN_USE}"),
    (
        ["hardware=1gpu", *ON, "evaluation.hand_off=background"],
        "evaluation.checkpoints=true with evaluation.hand_off=background needs a GPU that neither training nor vLLM "
        "uses: free one (they have cuda:0) and name it, such as evaluation.device=cuda:7",
    ),
    (
        [*SERVED, "evaluation.hand_off=background", "evaluation.device=cuda:7"],
        f"evaluation.device=cuda:7 is in use: {IN_USE}; free it (hardware.ranks, hardware.first_gpu,",
    ),
    (
        ["hardware=2node", *ON, "evaluation.hand_off=background", "evaluation.device=cuda:3"],
        "evaluation.device=cuda:3 is in use: training and vLLM have cuda:0, cuda:1, cuda:2, cuda:3",
    ),
    (
        [*LEARNER_ON_3, "evaluation.hand_off=background", "evaluation.device=cuda:3"],
        "evaluation.device=cuda:3 is in use: training and vLLM have cuda:3; free it",
    ),
    (
        [*SERVED, "evaluation.hand_off=slurm", "evaluation.device=cuda:1"],
        "evaluation.device=cuda:1 is of this machine, and evaluation.hand_off=slurm gives each job its own GPUs",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), HAND_OFF_RULES, ids=[" ".join(each) for each, _ in HAND_OFF_RULES])
def test_each_rule_of_the_hand_off_is_one_clear_line(overrides: list[str], expected: str) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ON,
        [*ON, "evaluation.hand_off=background"],
        [*ON, "evaluation.hand_off=background", "evaluation.device=cuda:0"],
        ["hardware=1gpu", *ON],
        ["hardware=1gpu", *ON, "evaluation.hand_off=background", "evaluation.device=cuda:1"],
        ["hardware=1gpu", *ON, "rollout.engine=hf", "evaluation.hand_off=background", "evaluation.device=cpu"],
        [*SERVED, "hardware.ranks=6", "evaluation.hand_off=background", "evaluation.device=cuda:7"],
        # Inline, the ranks wait.
        [*SERVED, "evaluation.device=cuda:7"],
        [*SERVED, "evaluation.hand_off=slurm", 'evaluation.sbatch=["--gres=gpu:1"]'],
    ],
    ids=" ".join,
)
def test_places_where_checkpoints_can_be_evaluated(overrides: list[str]) -> None:
    assert [line for line in validate(run_config(*overrides)) if "evaluation" in line] == []


WARNINGS: list[tuple[list[str], str]] = [
    (
        ["evaluation.hand_off=background"],
        "evaluation.hand_off=background evaluation.device=None evaluation.sbatch=[] have no effect without "
        "evaluation.checkpoints=true",
    ),
    (
        [*ON, 'evaluation.sbatch=["--gres=gpu:1"]'],
        "evaluation.sbatch=['--gres=gpu:1'] has no effect unless evaluation.hand_off=slurm",
    ),
    (
        ["objective=ggpo_reward_only", "schedule.t_ref=160"],
        "schedule.t_ref=160 has no effect: ggpo_reward_only as set here uses no reference",
    ),
    (
        ["objective=grpo", "objective.beta=0", "schedule.t_ref=epoch"],
        "schedule.t_ref=epoch has no effect: grpo as set here uses no reference",
    ),
    (
        ["objective=ggpo", "schedule.t_ref=7"],
        "schedule.t_ref=7 is shorter than a sync period of 8 updates: ggpo is then regularised to a policy newer than",
    ),
    (
        ["objective=agro", "schedule.v=128", "schedule.t_ref=160"],
        "schedule.t_ref=160 is no multiple of the sync period of 128 updates: the reference changes inside collections",
    ),
    (
        ["objective.mask_divisor=kept"],
        "objective.mask_divisor=kept has no effect unless objective.zero_variance=mask",
    ),
    (
        ["schedule.updates=50"],
        "evaluation.every=64 is beyond the budget of 50 updates: scores at the start and the end only",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), WARNINGS, ids=[" ".join(overrides) for overrides, _ in WARNINGS])
def test_each_warning_is_one_clear_line(overrides: list[str], expected: str) -> None:
    (line,) = validate(run_config(*overrides))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["objective=grpo", "schedule.t_ref=7"],
        ["objective=ggpo", "schedule.t_ref=null"],
        ["objective=ggpo", "schedule.t_ref=16"],
        ["objective=grpo_rg", "objective.mask_divisor=kept"],
        ["schedule.epochs=2"],
        # What a collection would need, and how stale it would be, is of no concern with a pool.
        ["source=pool", "pool.path=p", "collection.prompts_per_batch=1", "collection.max_batches=1"],
        ["source=pool", "pool.path=p", "objective=ggpo", "schedule.v=256"],
    ],
)
def test_what_is_as_meant_warns_of_nothing(overrides: list[str]) -> None:
    assert validate(run_config(*overrides)) == []
