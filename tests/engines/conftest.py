"""Real engines, started once a session where tests can share them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny import save_model
from vllm_cases import BuildEngine, members, vllm_config, vllm_shaped

from grpo_lab.rollout.vllm.engine import VllmEngine, build_vllm_engine
from grpo_lab.rollout.vllm.server import ServerHost
from grpo_lab.rollout.vllm.worker import WorkerHost


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3 as a folder. Tests must not write there."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (make engines)")
    return save_model(vllm_shaped(), tmp_path_factory.mktemp("vllm_model"))


@pytest.fixture
def build(vllm_model: Path, tmp_path: Path) -> Iterator[BuildEngine]:
    """Makes engines, and closes them. Their log is in `tmp_path`."""
    engines: list[VllmEngine] = []

    def make(*overrides: str) -> VllmEngine:
        engines.append(build_vllm_engine(vllm_config(*overrides), str(vllm_model), tmp_path))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def worker(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """A worker that every test leaves usable, whatever weights it holds."""
    yield from running(vllm_model, tmp_path_factory.mktemp("vllm_worker"), "worker")


@pytest.fixture(scope="session")
def server(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """A server of the run's own, likewise."""
    yield from running(vllm_model, tmp_path_factory.mktemp("vllm_server"), "server")


def running(model: Path, folder: Path, mode: str) -> Iterator[VllmEngine]:
    """An engine whose weights are laid in `folder`, which leaves nothing behind."""
    config = vllm_config(f"rollout.vllm.mode={mode}", f"rollout.vllm.weights_dir={folder / 'weights'}")
    engine = build_vllm_engine(config, str(model), folder)
    yield engine
    assert isinstance(engine.host, WorkerHost | ServerHost)
    process = engine.host._process
    assert process is not None
    assert len(members(process.group)) >= 2
    engine.close()
    assert members(process.group) == []
    left = folder / "weights"
    assert not left.exists() or list(left.iterdir()) == []
    engine.close()
