"""The small run's configuration, with its model made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import compose_small

from grpo_lab.config import TrainConfig


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def small(model_cache: Path) -> Callable[..., TrainConfig]:
    """A configuration of the small run, with overrides."""

    def make(*overrides: str) -> TrainConfig:
        return compose_small([f"model.cache_dir={model_cache}", *overrides])

    return make
