"""Imports follow the data: a module may import only what stands before it in ORDER, and heavy libraries stay where
they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_lab"

# Data flows down this list. A package stands for all its modules, which may import each other.
ORDER = [
    "metrics",
    "types",
    "seeds",
    "atomic",
    "config",
    "composition",
    "schedule",
    "validation_engines",
    "validation_hand_off",
    "validation",
    "runs",
    "launch",
    "guard",
    "guarded",
    "heap",
    "ledger",
    "command",
    "distributed",
    "process",
    "prompts",
    "plan",
    "tables",
    "logprobs",
    "objectives",
    "minibatches",
    "attention",
    "policy",
    "weights",
    "rollout",
    "rewards",
    "collect",
    "ahead",
    "learner",
    "diagnostics",
    "sync",
    "checkpoint",
    "evaluation",
    "report",
    "models",
    "tracking",
    "runstate",
    "hand_off",
    "offline",
    "loop",
    "build",
    "train",
    "evaluate",
    "pool",
]

# What starts here is imported by nobody.
COMMANDS = {"train", "evaluate"}

# Who may import a heavy library, anywhere in the file.
TENSORS = {
    "types",
    "logprobs",
    "objectives",
    "minibatches",
    "attention",
    "policy",
    "weights",
    "rollout",
    "models",
    "learner",
}
HEAVY = {
    "torch": {
        *TENSORS,
        "launch",
        "distributed",
        "process",
        "checkpoint",
        "evaluation",
        "runstate",
        "offline",
        "loop",
        "build",
        "report",
    },
    "transformers": {"attention", "policy", "rollout", "models", "prompts", "process"},
    "tokenizers": {"models"},
    "datasets": {"prompts", "offline"},
    "huggingface_hub": {"prompts", "evaluation"},
    "vllm": {"rollout"},
    "deepspeed": {"learner"},
    "wandb": {"tracking"},
    "rich": {"tracking", "plan", "tables", "evaluation"},
    "math_verify": {"rewards"},
    "pebble": {"rewards"},
    "hydra": {"composition", "command"},
    "matplotlib": {"report"},
}


def _files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.relative_to(PACKAGE).parts)


def _module(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if part == "__init__" else part


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path.name}: a relative import is not read here"
            yield node.module
            if node.module == "grpo_lab":
                yield from (f"grpo_lab.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upstream(path: Path) -> None:
    module = _module(path)
    if not module:
        return
    assert module in ORDER, f"{module} has no place in the order of the data: give it one"
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "grpo_lab" and len(parts) > 1 and parts[1] != module:
            # Types alone may be named from anywhere upstream or beside: they are records, not stages.
            assert ORDER.index(parts[1]) < ORDER.index(module), f"{path.name} imports {name}, which is downstream"
            assert parts[1] not in COMMANDS, f"{path.name} imports {name}, which is a command"
        elif parts[0] in HEAVY:
            assert module in HEAVY[parts[0]], f"{path.name} imports {parts[0]}"


def test_reports_load_what_draws_and_what_learns_in_one_file_each() -> None:
    """The rest of a report needs neither: tables are written where no figure is."""
    found = {
        (path.stem, name.split(".")[0])
        for path in (PACKAGE / "report").glob("*.py")
        for name in _imports(path)
        if name.split(".")[0] in ("torch", "matplotlib")
    }
    assert found == {("coefficients", "torch"), ("drawing", "matplotlib")}


def test_the_order_names_what_exists() -> None:
    assert set(ORDER) == {module for path in _files() if (module := _module(path))}


@pytest.mark.parametrize(
    "module",
    [
        "grpo_lab.train",
        "grpo_lab.evaluate",
        "grpo_lab.plan.__main__",
        "grpo_lab.tables.__main__",
        "grpo_lab.report.__main__",
        "grpo_lab.pool.__main__",
        "grpo_lab.composition",
        "grpo_lab.rewards",
        "grpo_lab.prompts",
    ],
)
def test_importing_stays_light(module: str) -> None:
    """A wrong setting fails, and a verifier's worker starts, before anything heavy is loaded."""
    probe = (
        f"import sys, {module}; "
        "print([name for name in ('torch', 'transformers', 'wandb', 'datasets', 'pyarrow', 'vllm', 'deepspeed') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "[]"
