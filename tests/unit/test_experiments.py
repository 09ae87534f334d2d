"""The papers' experiments, composed at both scales, against what the papers say, written here by hand."""

from __future__ import annotations

import pytest

from grpo_lab.composition import compose_run, conf_dir
from grpo_lab.config import TrainConfig
from grpo_lab.ledger import result_hash
from grpo_lab.schedule import Schedule
from grpo_lab.validation import validate

GG_PAPER = ("qwen3_1_7b_base", "alp_math", 256, 8000, 51)
GG_TINY = ("tiny", "arithmetic_mixed", 128, 1024, 17)
# Model, data, responses in an update, updates, evaluations while training.
GEOMETRY = {
    **{
        f"gg/{name}": (GG_PAPER, GG_TINY)
        for name in (
            *("default", "table1", "table2", "table3", "table4", "table6", "table7", "table8"),
            *("fig1", "fig2", "fig3", "fig5", "fig7", "fig8", "fig9", "fig10", "beta", "reward_only"),
        )
    },
    **{
        f"gg/{name}": (("qwen3_1_7b_base", "alp_math", 256, 400, 6), ("tiny", "arithmetic_mixed", 128, 400, 11))
        for name in ("table5", "fig4")
    },
    # 28 prompts of 16 responses; 7,473 problems are 266 such updates, and RG trains for four epochs.
    "rg/fig2": (
        ("qwen2_5_0_5b_instruct", "gsm8k", 448, 1064, 23),
        ("tiny", "arithmetic_epochs", 448, 256, 17),
    ),
    **{
        # 40,309 problems with an answer are 1,439 updates.
        f"rg/{name}": (
            ("r1_distill_qwen_1_5b", "deepscaler", 448, 1439, 0),
            ("tiny", "arithmetic_epochs", 448, 256, 17),
        )
        for name in ("table2", "table3", "fig3")
    },
    "rg/throughput": (("qwen2_5_7b", "orz_math", 512, 500, 0), ("tiny", "arithmetic_epochs", 448, 128, 5)),
}
BASES = ("gg/default", "rg/default")


def composed(experiment: str, scale: str, *words: str) -> TrainConfig:
    return compose_run([f"experiment={experiment}", f"scale={scale}", *words], {})


def evaluations(config: TrainConfig) -> int:
    schedule = Schedule.from_config(config)
    assert schedule.updates is not None
    return sum(schedule.evaluate(u) for u in range(schedule.updates + 1))


@pytest.mark.parametrize("scale", ["paper", "tiny"])
@pytest.mark.parametrize("experiment", GEOMETRY)
def test_geometry(experiment: str, scale: str) -> None:
    # Offline runs need a pool, which says nothing here.
    offline = ["pool.path=somewhere"] if composed(experiment, scale).source == "pool" else []
    config = composed(experiment, scale, *offline)
    responses = config.group_size * config.groups_per_minibatch
    found = (config.model.name, config.dataset.name, responses, config.schedule.updates, evaluations(config))
    assert found == GEOMETRY[experiment][scale == "tiny"]
    assert config.scale.name == scale
    assert config.hardware.device == ("cpu" if scale == "tiny" else "cuda")
    validate(config)


def test_every_file_is_in_the_table() -> None:
    files = {
        str(path.relative_to(conf_dir() / "experiment").with_suffix(""))
        for path in (conf_dir() / "experiment").glob("?g/*.yaml")
    }
    assert files == {*GEOMETRY, *BASES}


def test_gg_as_published() -> None:
    """GG C.1 and C.2, number by number."""
    config = composed("gg/table4", "paper")
    learner, rollout = config.learner, config.rollout
    assert (learner.lr, learner.betas, learner.weight_decay, learner.grad_clip) == (1e-6, [0.9, 0.999], 0.01, 1.0)
    assert (learner.lr_schedule, learner.warmup_updates, learner.precision) == ("constant", 0, "bf16")
    assert (rollout.temperature, rollout.top_p, rollout.top_k, rollout.vllm.dtype) == (1.0, 1.0, 0, "bf16")
    assert (rollout.max_prompt_tokens, rollout.max_response_tokens) == (2048, 2048)
    assert (config.seed, config.collection.max_batches, config.checkpoint.every) == (42, 32, 160)
    assert (config.evaluation.every, config.evaluation.n, config.evaluation.k) == (160, 32, [1, 4, 8, 16, 32])
    assert config.evaluation.benchmarks == ["math500", "aime24", "aime25", "olympiadbench", "minerva"]
    schedule = Schedule.from_config(config)
    assert (schedule.v, schedule.i, schedule.minibatches_per_collection, schedule.t_ref) == (8, 1, 8, 160)


@pytest.mark.parametrize(
    ("objective", "beta", "t_ref"), [("grpo", 0.01, None), ("grpo_tis", 0.01, None), ("agro", 0.01, 160)]
)
def test_gg_method_by_method(objective: str, beta: float, t_ref: int | None) -> None:
    config = composed("gg/table4", "paper", f"objective={objective}")
    assert vars(config.objective)["beta"] == beta
    assert Schedule.from_config(config).t_ref == t_ref


def test_rg_as_published() -> None:
    """RG 5.1 and 5.2, number by number."""
    first, second = composed("rg/fig2", "paper"), composed("rg/table2", "paper")
    for config in (first, second):
        assert (config.group_size, config.groups_per_minibatch, config.hardware.name) == (16, 28, "8gpu_server")
        assert (config.objective.name, config.objective.zero_variance) == ("grpo_rg", "keep")
        assert config.schedule.minibatches_per_collection == 1
        assert (config.learner.weight_decay, config.learner.lr_schedule) == (0.0, "linear")
    assert (first.learner.lr, vars(first.objective)["beta"], first.rollout.temperature) == (5e-6, 0.1, 0.1)
    assert (first.rollout.max_response_tokens, first.evaluation.n, first.schedule.t_ref) == (200, 50, "epoch")
    assert (second.learner.lr, vars(second.objective)["beta"], second.rollout.temperature) == (1e-6, 0.001, 0.7)
    assert (second.rollout.max_response_tokens, second.evaluation.max_tokens) == (4096, 32768)
    speed = composed("rg/throughput", "paper")
    assert (speed.hardware.name, speed.rollout.vllm.tensor_parallel) == ("8gpu_colocate_tp4", 4)
    assert speed.rollout.vllm.memory_share == 0.3


def test_tiny_keeps_the_ladder_and_changes_rates_and_beta_by_objective() -> None:
    """beta times the mean length is 7 for AGRO and GGPO at either scale: 0.01 x 700, 0.32 x 22."""
    expected = {"grpo": (2e-4, 0.01), "agro": (1e-4, 0.32), "ggpo": (1e-4, 0.32)}
    for objective, (lr, beta) in expected.items():
        config = composed("gg/table1", "tiny", f"objective={objective}")
        assert (config.learner.lr, vars(config.objective)["beta"], config.schedule.v) == (lr, beta, 8)
        assert config.schedule.updates == 1024


def test_the_command_line_wins_over_an_experiment_at_either_scale() -> None:
    for scale in ("paper", "tiny"):
        words = ["model=smollm2_135m", "dataset=mawps", "schedule.updates=3", "hardware=cpu_2rank"]
        config = composed("rg/fig2", scale, *words, "learner.lr=1e-3")
        assert (config.model.name, config.dataset.name, config.schedule.updates) == ("smollm2_135m", "mawps", 3)
        assert (config.hardware.name, config.learner.lr) == ("cpu_2rank", 1e-3)


def test_a_value_for_a_scale_that_an_experiment_lacks() -> None:
    from omegaconf import OmegaConf

    tree = OmegaConf.create({"scale": {"name": "huge"}, "x": "${by_scale:{paper:1,tiny:2}}"})
    with pytest.raises(Exception, match="scale=huge is not among those that this experiment has: paper, tiny"):
        _ = tree.x


# --- what makes two runs one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["schedule.t_ref=160"],
        ["schedule.minibatches_per_collection=8"],
        ["run_dir=elsewhere", "tracking.wandb=disabled", "tracking.view=off"],
        ["hardware.threads=1", "learner.micro_batch_tokens=8192", "rollout.max_rows=512"],
        ["checkpoint.every=64", "checkpoint.keep=5"],
        ["evaluation.benchmarks=[math500]", "evaluation.checkpoints=true", "evaluation.hand_off=background"],
    ],
)
def test_one_run_whatever_does_not_decide_its_results(words: list[str]) -> None:
    assert result_hash(composed("gg/table4", "tiny", *words)) == result_hash(composed("gg/table1", "tiny"))


@pytest.mark.parametrize(
    "word",
    [
        "seed=43",
        "schedule.v=16",
        "schedule.t_ref=null",
        "schedule.updates=1000",
        "learner.lr=5e-5",
        "learner.precision=bf16",
        "objective.beta=0.5",
        "objective=agro",
        "model=tiny_large",
        "dataset=arithmetic_hard",
        "rollout.engine=vllm",
        "evaluation.n=16",
    ],
)
def test_another_run_for_what_does(word: str) -> None:
    assert result_hash(composed("gg/table4", "tiny", word)) != result_hash(composed("gg/table4", "tiny"))
