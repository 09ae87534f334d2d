"""The way from YAML to objects and back: every file of conf/ composes, as Hydra has it, and comes back from disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from run_config import composed, run_config

from grpo_lab.composition import conf_dir, config_hash, dataset_config, load_config, register, save_config, to_config
from grpo_lab.config import ArithmeticConfig, ConfigError, MixtureConfig, TableConfig, TrainConfig
from grpo_lab.validation import validate

# --- composition ------------------------------------------------------------------------------------------------


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


# Groups whose every option is a run that may start. A data set may be for evaluation alone, a pool has a path.
RUNNABLE = ("model", "objective", "schedule", "hardware", "evaluation", "tracking", "scale", "experiment", "debug")


def test_no_yaml_is_outside_the_groups_that_are_walked() -> None:
    found = {path.relative_to(conf_dir()).parts[0] for path in conf_dir().rglob("*.yaml")}
    # test_experiments.py and test_tables.py walk the folders of experiment and tables.
    assert found == {*RUNNABLE, "dataset", "source", "hydra", "tables", "config.yaml"}


def test_hardware_presets_are_what_their_names_say() -> None:
    told = {}
    for name in options("hardware"):
        config = run_config(f"hardware={name}")
        assert config.hardware.name == name
        h, vllm = config.hardware, config.rollout.vllm
        sampler = (
            config.rollout.engine if config.rollout.engine == "hf" else f"vllm {vllm.mode} x{vllm.tensor_parallel}"
        )
        learner = f"{config.learner.engine} {config.learner.zero_stage} {config.learner.precision}"
        told[name] = (h.device, h.ranks, h.nodes, sampler, learner)
    assert told == {
        "cpu": ("cpu", 1, 1, "hf", "torch_local 0 fp32"),
        "cpu_vllm": ("cpu", 1, 1, "vllm worker x1", "torch_local 0 fp32"),
        "cpu_2rank": ("cpu", 2, 1, "hf", "deepspeed 2 fp32"),
        "cpu_vllm_2rank": ("cpu", 2, 1, "vllm worker x1", "deepspeed 2 fp32"),
        "1gpu": ("cuda", 1, 1, "vllm in_process x1", "torch_local 0 bf16"),
        "8gpu_server": ("cuda", 7, 1, "vllm server x1", "deepspeed 2 bf16"),
        "8gpu_colocate_tp4": ("cuda", 8, 1, "vllm in_process x4", "deepspeed 3 bf16"),
        "2node": ("cuda", 16, 2, "vllm in_process x4", "deepspeed 3 bf16"),
        "slurm": ("cuda", 7, 1, "vllm server x1", "deepspeed 2 bf16"),
    }


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["hardware=8gpu_server"], True),
        (["hardware=8gpu_colocate_tp4"], True),
        (["hardware=8gpu_server", "rollout.vllm.mode=worker"], False),
        (["hardware=8gpu_server", "rollout.vllm.dtype=fp32"], False),
        (["hardware=cpu_vllm", "rollout.vllm.mode=server", "rollout.vllm.dtype=bf16"], False),
        (["hardware=cpu_vllm", "rollout.vllm.mode=in_process", "rollout.vllm.dtype=bf16"], True),
        (["learner.precision=bf16"], False),
    ],
)
def test_a_sync_that_scoring_alone_proves_in_bf16_is_warned_of(overrides: list[str], warned: bool) -> None:
    said = "in bf16 a sync is proved by scoring alone"
    assert any(said in line for line in validate(run_config(*overrides))) == warned


def test_engines_of_two_precisions_are_warned_of() -> None:
    assert any(
        "rollout.vllm.dtype=bf16 and learner.precision=fp32 differ" in line
        for line in validate(run_config("hardware=cpu_vllm", "rollout.vllm.dtype=bf16"))
    )


@pytest.mark.parametrize("choice", [f"{group}={option}" for group in RUNNABLE for option in options(group)])
def test_every_yaml_composes_to_a_valid_run(choice: str) -> None:
    validate(run_config(choice))


@pytest.mark.parametrize("objective", options("objective"))
def test_every_objective_at_paper_scale_keeps_the_papers_numbers(objective: str) -> None:
    config = run_config("scale=paper", f"objective={objective}")
    assert validate(config) == []
    assert (config.objective.name, config.schedule.updates) == (objective, 8000)
    assert config.objective.beta == (0.1 if objective == "grpo_rg" else 0.01)  # type: ignore[attr-defined]
    assert (config.groups_per_minibatch, config.group_size, config.schedule.v) == (32, 8, 8)
    learner = config.learner
    assert (learner.lr, learner.betas, learner.weight_decay, learner.grad_clip) == (1e-6, [0.9, 0.999], 0.01, 1.0)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 2048)
    assert (config.evaluation.every, config.evaluation.n, config.evaluation.k) == (160, 32, [1, 4, 8, 16, 32])


@pytest.mark.parametrize("name", ["arithmetic_plain", "gsm8k", "alp_math"])
def test_a_data_set_composes_within_a_run_as_it_does_alone(name: str) -> None:
    config = run_config(f"dataset={name}")
    assert config.dataset == dataset_config(name)
    validate(config)


@pytest.mark.parametrize("name", options("dataset"))
def test_every_data_set_composes_and_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    config = replace(run_config(), dataset=dataset_config(name))
    assert config.dataset.name == name
    kind = {"arithmetic": ArithmeticConfig, "table": TableConfig, "mixture": MixtureConfig}[config.dataset.kind]
    assert type(config.dataset) is kind
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", options("objective"))
def test_every_objective_comes_back_from_a_file(name: str, tmp_path: Path) -> None:
    config = run_config(f"objective={name}", "schedule.t_ref=epoch", "learner.grad_clip=inf", "seed=7")
    save_config(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    assert type(again.objective) is type(config.objective)
    assert config_hash(again) == config_hash(config)
    assert "${" not in (tmp_path / "config.yaml").read_text()


def test_a_later_group_wins_and_the_command_line_wins_over_all() -> None:
    assert run_config("objective=ggpo").learner.lr == 4e-5
    assert run_config("objective=ggpo", "learner.lr=0.5").learner.lr == 0.5
    assert run_config("objective=ggpo", "debug=frozen").learner.lr == 0.0
    assert run_config("objective=ggpo").schedule.updates == 1024
    assert run_config("objective=ggpo", "schedule.updates=3").schedule.updates == 3


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("schedule.nope=1", "nope"),
        ("nope=1", "nope"),
        ("objective.token_clip=0.1", "token_clip"),
        ("objective=nope", "nope"),
        ("schedule.v=often", "schedule.v"),
        ("schedule.v=1.5", "schedule.v"),
        ("learner.lr=fast", "learner.lr"),
        ("dataset.chat=maybe", "dataset.chat"),
        ("evaluation.k=[a]", "evaluation.k"),
        ("group_size=null", "group_size"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused_by_name(override: str, expected: str) -> None:
    with pytest.raises((HydraException, ConfigError)) as caught:
        to_config(composed(override))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=ggpo", "schedule.v=4", "schedule.t_ref=null", "evaluation.k=[1,2]", "learner.grad_clip=inf"],
        ["debug=frozen", "learner.lr=1e-3", "run_dir=some/where", "dataset.template='{question}: '"],
    ],
)
def test_these_tests_set_keys_as_hydra_does(overrides: list[str]) -> None:
    assert run_config(*overrides) == to_config(composed(*overrides))


def test_a_value_that_leads_nowhere_is_one_line_with_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        run_config("objective.name=mine")
    assert "scale.presets.mine" in str(caught.value)
    assert "\n" not in str(caught.value)
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        bare = compose("schema")
    with pytest.raises(ConfigError, match="seed"):
        to_config(bare)


# --- files and hashes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seed: 1",
        "dataset: [",
        "- a list",
        "dataset: {kind: table}\nobjective: {family: sac}",
        "dataset: {kind: photos}\nobjective: {family: grpo}",
        "dataset: {kind: table}\nobjective: {family: grpo, temperature: 3}",
        "dataset: {kind: table}\nobjective: {family: grpo, beta: big}",
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path} does not fit this version of grpo_lab: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_data_set_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml is missing: resume= takes a run folder"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"there is no data set 'nope': .* holds no nope\.yaml"):
        dataset_config("nope")


def test_the_hash_is_of_the_values() -> None:
    one, same, other = dataset_config("arithmetic"), dataset_config("arithmetic"), dataset_config("arithmetic_hard")
    assert config_hash(one) == config_hash(same)
    assert config_hash(one) != config_hash(other)
    assert len(config_hash(one)) == 12


def test_configuration_imports_no_heavy_library() -> None:
    """A wrong setting must fail before torch has loaded, and worker processes must not load it at all."""
    code = (
        "import sys, grpo_lab.composition, grpo_lab.validation, grpo_lab.schedule, grpo_lab.types, grpo_lab.metrics; "
        "print(sorted({'torch', 'transformers', 'wandb', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_a_saved_configuration_is_plain_yaml(tmp_path: Path) -> None:
    config = run_config()
    save_config(config, tmp_path / "config.yaml")
    plain = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert isinstance(plain, dict)
    assert plain["objective"]["family"] == "grpo"
    assert list(plain) == list(TrainConfig.__dataclass_fields__)
