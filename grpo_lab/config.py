"""Every key of a run, typed. The values live in `conf/`.

Importing this module loads neither torch nor an engine. The way from `conf/` to these objects is `composition.py`,
rules that span keys are in `validation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf


class ConfigError(ValueError):
    """A setting that cannot work. The message is one line that names the key and the fix."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, for a message of one line; its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- model ------------------------------------------------------------------------------------------------------


@dataclass
class RecipeConfig:
    """A model made here: its shape, and the supervised warm start that stops at a target accuracy."""

    architecture: str = MISSING
    hidden: int = MISSING
    layers: int = MISSING
    heads: int = MISSING
    head_dim: int = MISSING
    intermediate: int = MISSING
    seed: int = MISSING
    warm_lr: float = MISSING
    warm_batch: int = MISSING
    warm_max_steps: int = MISSING
    warm_check_every: int = MISSING
    warm_target: float = MISSING


@dataclass
class ShapeConfig:
    """The size of a decoder of the Llama family, read by plans alone; null: not told."""

    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    # Whether the output matrix is the input matrix.
    tied: bool | None = None
    # Biases of query, key and value; norms of query and key.
    qkv_bias: bool = False
    qk_norm: bool = False


@dataclass
class ModelConfig:
    """Where the initial policy comes from: a hub id, a local folder (`path` wins), or a recipe."""

    name: str = MISSING
    id: str | None = None
    revision: str | None = None
    path: str | None = None
    cache_dir: str = MISSING
    recipe: RecipeConfig | None = None
    # A recipe, and a folder with a config.json, tell theirs themselves.
    shape: ShapeConfig = field(default_factory=ShapeConfig)


# --- data -------------------------------------------------------------------------------------------------------


@dataclass
class DatasetConfig:
    """What every data set has. The prompt is `system_prompt` and `template` with {question} filled in, through the
    model's chat template where it has one and `chat` is true; as plain text otherwise."""

    kind: str = MISSING
    name: str = MISSING
    system_prompt: str | None = None
    template: str = "{question}"
    chat: bool = True
    # How a completion is judged: `math` (final answer, math-verify) or `exact` (text after the last #).
    verifier: str = "math"
    # A row that cannot be used: `stop` the run, or `skip` and count it.
    on_error: str = "stop"
    # Share of the problems held out by a hash of the question, where a data set has no test source of its own.
    # 1 makes an evaluation set: every problem is a test problem.
    held_out: float = 0.0


@dataclass
class ArithmeticConfig(DatasetConfig):
    """The made task: sums of numbers of `min_digits` to `max_digits` digits, with or without a scratchpad."""

    min_digits: int = MISSING
    max_digits: int = MISSING
    operands: int = MISSING
    scratchpad: bool = MISSING
    train_problems: int = MISSING
    test_problems: int = MISSING
    data_seed: int = MISSING


@dataclass
class ColumnsConfig:
    """Which columns hold what. `question` may name several columns, joined by a blank. Any name may give
    alternatives, `a|b`: the first that a row has counts, so that one mapping serves the hub and a local copy."""

    question: list[str] = MISSING
    answer: str = MISSING
    # How the gold answer is read: `plain`, `hash` (after the last ####), `boxed` (the last box), `list` (every
    # member), `number` (14.0 is 14), or `chat_gold` (a nested {"ground_truth": ...}). Alternatives of `answer` may
    # each have their own kind: `plain|boxed`.
    gold: str = "plain"
    # Text cut from the end of a question: an instruction that the data set carries and the template replaces.
    strip_suffix: str | None = None
    tolerance: str | None = None
    unit: str | None = None
    tags: list[str] = field(default_factory=list)
    # Keep rows where the mean of the list in `score` lies strictly between the bounds.
    score: str | None = None
    score_above: float | None = None
    score_below: float | None = None


@dataclass
class TableConfig(DatasetConfig):
    """A table of problems: a hub data set at a pinned revision, or local JSON lines / parquet (`path` wins)."""

    id: str | None = None
    subset: str | None = None
    revision: str | None = None
    # One file of the hub repository, read as it is, where its splits are not wanted.
    file: str | None = None
    split: str = "train"
    path: str | None = None
    # The held-out problems: another split of the same source, or a local file of their own.
    test_split: str | None = None
    test_path: str | None = None
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    # Published row counts, of the main source and of the test source; different ones are warnings.
    expected_rows: int | None = None
    expected_test_rows: int | None = None


@dataclass
class MixtureConfig(DatasetConfig):
    """Several tables, in order, exact duplicates removed keeping the first."""

    parts: list[TableConfig] = MISSING
    expected_rows: int | None = None
    expected_unique: int | None = None
    expected_fitting: int | None = None
    # Evaluation sets whose overlap with this one is reported: names of files in conf/dataset.
    overlap_with: list[str] = field(default_factory=list)
    overlap_paths: dict[str, str] = field(default_factory=dict)
    # The held-out problems: a file in conf/dataset, and a local copy of it.
    test_set: str | None = None
    test_path: str | None = None


# --- objective --------------------------------------------------------------------------------------------------


@dataclass
class ObjectiveConfig:
    """What every objective has. `zero_variance`: `filter` drops and refills groups of equal rewards while
    collecting, `mask` gives them zero weight, `keep` does nothing."""

    family: str = MISSING
    name: str = MISSING
    zero_variance: str = MISSING
    mask_divisor: str = "all"

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads the reference's log-probs."""
        return True


@dataclass
class GrpoConfig(ObjectiveConfig):
    """GRPO with its options (RG Eqs. 2-8, GG C.2) and truncated importance sampling (GG Eq. 61)."""

    advantage: str = MISSING
    clip_center: str = MISSING
    eps_low: float = MISSING
    eps_high: float = MISSING
    dual_clip: float | None = MISSING
    beta: float = MISSING
    kl_clamp: str = MISSING
    aggregation: str = MISSING
    tis_block: int | None = None
    tis_cap: float | None = None

    @property
    def reads_reference(self) -> bool:
        return self.beta > 0


@dataclass
class AgroConfig(ObjectiveConfig):
    """AGRO (GG Eq. 62)."""

    beta: float = MISSING


@dataclass
class GgpoConfig(ObjectiveConfig):
    """GGPO (GG Eqs. 6, 8-11), with token clipping (Eqs. 63-66) where `token_clip` is set."""

    beta: float = MISSING
    token_clip: float | None = None
    reward_only: bool = False

    @property
    def reads_reference(self) -> bool:
        return not self.reward_only


# --- the rest ---------------------------------------------------------------------------------------------------


@dataclass
class ScheduleConfig:
    """When what happens; see `schedule.py`. `t_ref` and `minibatches_per_collection` also take words."""

    v: int = MISSING
    i: int = MISSING
    # A number that divides v, or `v`.
    minibatches_per_collection: Any = MISSING
    # A number of updates, null (fixed), `epoch`, or `auto`.
    t_ref: Any = MISSING
    # Sample the next collection while the current one is learned from: samples are up to a collection older.
    overlap: bool = MISSING
    updates: int | None = MISSING
    epochs: int | None = None


@dataclass
class PoolConfig:
    """A recorded pool of groups: the folder that `python -m grpo_lab.pool` made."""

    path: str | None = None


@dataclass
class CollectionConfig:
    # null: minibatches_per_collection * groups_per_minibatch.
    prompts_per_batch: int | None = None
    max_batches: int = MISSING


@dataclass
class VllmConfig:
    """The vLLM engine. Times are limits in seconds after which it counts as lost."""

    # worker (a process of its own, started by the run), in_process (inside the learner's, on its device), or server
    # (`vllm serve`: the one at rollout.url, else one started by the run).
    mode: str = MISSING
    tensor_parallel: int = MISSING
    # fp32 or bf16; the learner's precision is the one that its log-probs agree with.
    dtype: str = MISSING
    # Share of a GPU's memory that the engine may take; on a CPU the key-value cache has a size of its own.
    memory_share: float = MISSING
    kv_cache_gb: int | None = MISSING
    # Longest prompt + response; null: what the run's own limits add up to.
    max_model_len: int | None = MISSING
    # Without graph capture or compilation: starts sooner, samples slower.
    eager: bool = MISSING
    # GPUs of a worker or server that the run starts, numbered as the run sees them; null: all of those.
    devices: str | None = MISSING
    # Give the engine's memory to the learner while it learns (in_process on a GPU).
    sleep: bool = MISSING
    seed: int = MISSING
    start_timeout: float = MISSING
    generate_timeout: float = MISSING
    sync_timeout: float = MISSING
    # Times that a lost worker or server of the run's own is started again, over the run.
    restarts: int = MISSING
    # Where weights are laid for an engine in another process; both must see it. null: in the run folder.
    weights_dir: str | None = MISSING
    # Further engine arguments, by vLLM's own names.
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutConfig:
    # hf (embedded) or vllm.
    engine: str = MISSING
    # An OpenAI-style server that `vllm serve` runs, for vllm.mode=server; null: the run starts its own.
    url: str | None = None
    vllm: VllmConfig = field(default_factory=VllmConfig)
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    max_prompt_tokens: int = MISSING
    max_response_tokens: int = MISSING
    # Rows sampled side by side; bounds the memory of the key-value cache.
    max_rows: int = MISSING


@dataclass
class LearnerConfig:
    # torch_local (one rank) or deepspeed.
    engine: str = MISSING
    lr: float = MISSING
    betas: list[float] = MISSING
    weight_decay: float = MISSING
    grad_clip: float = MISSING
    # constant, or linear (to zero at the end of the budget).
    lr_schedule: str = MISSING
    warmup_updates: int = MISSING
    # fp32, or bf16 (compute; master weights, gradient sums and optimizer stay FP32).
    precision: str = MISSING
    # DeepSpeed: what is sharded over ranks. 0 nothing, 1 the optimizer, 2 gradients as well, 3 parameters as well.
    zero_stage: int = MISSING
    # DeepSpeed: kept in CPU memory (parameters: stage 3 only).
    offload_optimizer: bool = MISSING
    offload_parameters: bool = MISSING
    # Activations are computed again in the backward pass instead of being kept.
    activation_checkpointing: bool = MISSING
    # Positions of a packed micro-batch, padding included.
    micro_batch_tokens: int = MISSING
    # Response tokens whose full-vocabulary logits are held at once.
    logit_chunk: int = MISSING


# Data sets that `evaluation.benchmarks` may name: files of conf/dataset, which hold all else about them.
BENCHMARKS = ("gsm8k", "math500", "aime24", "aime25", "olympiadbench", "minerva", "arithmetic")


@dataclass
class EvaluationConfig:
    """Evaluation inside the loop, of the run's own held-out problems, and by the command. What is null is as in
    training."""

    every: int | None = MISSING
    # What the command evaluates; empty: the run's own held-out problems.
    benchmarks: list[str] = field(default_factory=list)
    # Local copies by benchmark; null: the hub.
    paths: dict[str, str | None] = field(default_factory=dict)
    problems: int | None = MISSING
    n: int = MISSING
    k: list[int] = MISSING
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    # The command has lighteval judge as well; null: its Python in .venv-eval (`make eval-env`).
    lighteval: bool = False
    lighteval_python: str | None = None
    # Each checkpoint is evaluated by the command when it is saved: inline (training waits), background (beside it), or
    # slurm (a job each).
    checkpoints: bool = False
    hand_off: str = "inline"
    # Where: cpu, or one GPU such as cuda:7; null: as training.
    device: str | None = None
    # Words for sbatch.
    sbatch: list[str] = field(default_factory=list)


@dataclass
class CheckpointConfig:
    every: int | None = MISSING
    keep: int = MISSING


@dataclass
class TrackingConfig:
    # auto (online where a key is set up, offline otherwise), online, offline, disabled.
    wandb: str = MISSING
    project: str = MISSING
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    # auto (a live view on a terminal, plain lines elsewhere), live, plain, off.
    view: str = MISSING
    # A sample of rollouts is written every this many updates.
    rollouts_every: int | None = MISSING
    # Minibatches of a logged block (sequence ESS).
    block: int = MISSING


@dataclass
class VerifierConfig:
    workers: int = MISSING
    # Seconds that one answer may take before its worker is killed.
    timeout: float = MISSING


@dataclass
class PresetConfig:
    """What a scale sets per objective."""

    lr: float = MISSING
    beta: float = MISSING
    updates: int = MISSING


@dataclass
class ScaleConfig:
    """`paper` or `tiny`; `presets` by the name of the objective."""

    name: str = MISSING
    presets: dict[str, PresetConfig] = field(default_factory=dict)


@dataclass
class HardwareConfig:
    name: str = MISSING
    # cpu, or cuda (rank r of a node has GPU first_gpu + r), or one GPU such as cuda:0.
    device: str = MISSING
    # Learner processes over all nodes.
    ranks: int = MISSING
    nodes: int = MISSING
    first_gpu: int = MISSING
    # CPU threads of a rank.
    threads: int = MISSING


@dataclass
class TrainConfig:
    """One run."""

    seed: int = MISSING
    group_size: int = MISSING
    groups_per_minibatch: int = MISSING
    run_dir: str | None = None
    resume: str | None = None
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    dataset: DatasetConfig = MISSING
    objective: ObjectiveConfig = MISSING
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # Where groups come from: policy (sampled by the current policy) or pool (recorded beforehand).
    source: str = "policy"
    pool: PoolConfig = field(default_factory=PoolConfig)
    collection: CollectionConfig = field(default_factory=CollectionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)


DATASET_SCHEMAS = {"arithmetic": ArithmeticConfig, "table": TableConfig, "mixture": MixtureConfig}
OBJECTIVE_SCHEMAS = {"grpo": GrpoConfig, "agro": AgroConfig, "ggpo": GgpoConfig}


def by_scale(values: DictConfig, *, _root_: DictConfig) -> Any:
    """`${by_scale:{paper:5e-6,tiny:2e-4}}`: the value, or the option of a group, at the scale that was chosen.

    `_root_` is the configuration, or, where a defaults list names an option by it, the choices of groups.

    Raises:
        ConfigError: no value is given for that scale.
    """
    scale = _root_.scale if isinstance(_root_.scale, str) else _root_.scale.name
    if scale not in values:
        raise ConfigError(f"scale={scale} is not among those that this experiment has: {', '.join(map(str, values))}")
    return values[scale]


# On import, and beside the types: workers of a parallel launcher compose their jobs with no more than these loaded.
OmegaConf.register_new_resolver("by_scale", by_scale, replace=True)
