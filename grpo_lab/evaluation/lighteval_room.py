r"""lighteval at work in an environment of its own. Run by path with that environment's Python; imports none of ours.

    python -I lighteval_room.py REQUEST.json ANSWER.json

The request names an action, a scratch folder and tasks; the pipeline is lighteval's own.

pose    the documents of each task as lighteval poses them: the user's text, how many responses it asks for, limits
score   the same tasks, with our responses in place of a model's: lighteval's scores, and its verdict on each response

A task is {"name", "n", "ks", "rows", "limit", "ours"}. `rows` is a folder that holds test.jsonl, or null for
lighteval's own source, of which at most `limit` documents are taken. With "ours" the task is defined here, on rows
{"prompt", "gold"}; otherwise it is lighteval's task of that name, with its prompt function and metrics. For score,
"responses" is {task: {document id: [texts]}}.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Importing lighteval's task of this name downloads a file into the installed package. Nothing here uses the task.
DOWNLOADER = "lighteval.tasks.tasks.tiny_benchmarks"
# A huge power in an answer asks for all the memory there is; lighteval's time limits do not reach into C.
MEMORY_BYTES = 24 * 2**30

Json = dict[str, Any]
# Scores by (gold answers, text), with what was extracted.
Memory = dict[tuple[tuple[str, ...], str], tuple[float, str | None]]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.modules[DOWNLOADER] = types.ModuleType(DOWNLOADER)
    answer: Json = {"lighteval": version("lighteval"), "tasks": {}}
    # One pipeline a task: lighteval scores all tasks of a pipeline together, and names them by name alone.
    for task in request["tasks"]:
        act = {"pose": pose, "score": score}[request["action"]]
        answer["tasks"][task["name"]] = act(task, request)
    part = Path(f"{sys.argv[2]}.part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    os.replace(part, sys.argv[2])


def pose(task: Json, request: Json) -> Json:
    pipeline = build_pipeline(task, request, responses={})
    (lighteval_task,) = pipeline.tasks_dict.values()
    split = lighteval_task.dataset[lighteval_task.evaluation_split[0]]
    return {
        "documents": [
            {
                "id": doc.id,
                "text": message(doc),
                "question": question(split[int(doc.id)]),
                "n": doc.num_samples,
                "max_tokens": doc.generation_size,
                "stop": list(doc.stop_sequences or ()),
            }
            for doc in documents(pipeline)
        ],
    }


def score(task: Json, request: Json) -> Json:
    responses = request["responses"][task["name"]]
    pipeline = build_pipeline(task, request, responses)
    (lighteval_task,) = pipeline.tasks_dict.values()
    memory: Memory = {}
    for metric in lighteval_task.metrics:
        remember(metric.sample_level_fn, memory)
    pipeline.evaluate()
    results = pipeline.get_results()["results"]
    scores = next(row for name, row in results.items() if name != "all")
    # Its first metric's; all metrics of these tasks judge single responses alike.
    judging = lighteval_task.metrics[0].sample_level_fn
    verdicts, extracted = {}, {}
    for doc in documents(pipeline):
        judged = [judge(judging, doc, text, memory) for text in responses[doc.id]]
        verdicts[doc.id] = [one for one, _ in judged]
        extracted[doc.id] = [text for _, text in judged]
    return {
        "prompt_function": "grpo_lab's prompt" if task["ours"] else qualified_name(lighteval_task.formatter),
        "scores": {
            f"{label(metric)}{part}": float(scores[f"{metric.metric_name}{part}"])
            for metric in lighteval_task.metrics
            for part in ("", "_stderr")
            if f"{metric.metric_name}{part}" in scores
        },
        "verdicts": verdicts,
        "extracted": extracted,
    }


def build_pipeline(task: Json, request: Json, responses: Mapping[str, list[str]]) -> Any:
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters

    tasks = types.ModuleType("grpo_lab_tasks")
    spec = f"{task['name']}|0"
    if task["ours"]:
        tasks.TASKS_TABLE = [our_task(task)]  # type: ignore[attr-defined]
    else:
        config = find_config(task["name"])
        if task["rows"] is not None:
            config.hf_repo, config.hf_subset, config.hf_revision = task["rows"], "default", None
            config.hf_avail_splits = config.evaluation_splits = ("test",)
        if takes_n(config):
            spec = f"{task['name']}@n={task['n']}|0"
    parameters = PipelineParameters(
        launcher_type=ParallelismManager.NONE, custom_tasks_directory=tasks, max_samples=task.get("limit")
    )
    tracker = EvaluationTracker(output_dir=request["scratch"])
    model = replay(responses, request["scratch"])
    return Pipeline(tasks=spec, pipeline_parameters=parameters, evaluation_tracker=tracker, model=model)


def find_config(name: str) -> Any:
    """lighteval's own record of a task: what is changed in it, the pipeline's registry sees."""
    from lighteval.tasks.registry import Registry

    configs = Registry.load_all_task_configs()
    if name not in configs:
        raise SystemExit(f"lighteval {version('lighteval')} has no task {name}")
    return configs[name]


def takes_n(config: Any) -> bool:
    """Whether the number of responses is a parameter of all its metrics."""
    return all(hasattr(metric.sample_level_fn, "n") for metric in config.metrics)


def our_task(task: Json) -> Any:
    """A task that poses our prompts as they are. The gold answer is boxed: lighteval reads LaTeX in no other place."""
    from lighteval.metrics.metrics import Metrics
    from lighteval.tasks.lighteval_task import LightevalTaskConfig
    from lighteval.tasks.requests import Doc

    def our_prompt(line: Json, task_name: str | None = None) -> Any:
        return Doc(task_name=task_name, query=line["prompt"], choices=[rf"$\boxed{{{line['gold']}}}$"], gold_index=0)

    n = task["n"]
    return LightevalTaskConfig(
        name=task["name"],
        prompt_function=our_prompt,
        hf_repo=task["rows"],
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        metrics=[
            *(Metrics.pass_at_k_math(sample_params={"k": k, "n": n}) for k in task["ks"]),
            Metrics.avg_at_n_math(sample_params={"n": n}),
        ],
    )


def replay(responses: Mapping[str, list[str]], scratch: str) -> Any:
    """A model that answers each document with the responses it is given."""
    from lighteval.models.abstract_model import LightevalModel, ModelConfig
    from lighteval.models.model_output import ModelResponse
    from lighteval.utils.cache_management import SampleCache

    class Replay(LightevalModel):
        def __init__(self) -> None:
            self.config = ModelConfig(model_name="replay", cache_dir=scratch)
            self._cache = SampleCache(self.config)

        tokenizer = None
        add_special_tokens = False
        max_length = 0

        def greedy_until(self, docs: list[Any]) -> list[Any]:
            if unknown := set(responses) - {doc.id for doc in docs}:
                raise SystemExit(f"responses to {len(unknown)} documents that the task does not hold: {min(unknown)}")
            for doc in docs:
                got = len(responses.get(doc.id, ()))
                if got != doc.num_samples:
                    raise SystemExit(f"document {doc.id} needs {doc.num_samples} responses and has {got}")
            return [ModelResponse(text=responses[doc.id]) for doc in docs]

        def loglikelihood(self, docs: list[Any]) -> list[Any]:
            raise SystemExit("the task asks for log-likelihoods; only tasks that generate can be judged here")

        loglikelihood_rolling = loglikelihood

    return Replay()


def remember(metric: Any, memory: Memory) -> None:
    """Have a metric's scoring of single responses done once, whatever number of metrics asks for it."""
    name = "compute_score" if hasattr(metric, "compute_score") else "compute"
    original: Callable[..., float] = getattr(metric, name)

    def scoring(doc: Any, model_response: Any) -> float:
        key = (tuple(doc.get_golds()), "\0".join(model_response.final_text))
        if key not in memory:
            doc.specific = None
            value = float(original(doc=doc, model_response=model_response))
            found = (doc.specific or {}).get("extracted_predictions") or [None]
            memory[key] = value, found[0]
        return memory[key][0]

    setattr(metric, name, scoring)


def judge(metric: Any, doc: Any, text: str, memory: Memory) -> tuple[float, str | None]:
    """A metric's verdict on one response alone, with the answer it read."""
    from lighteval.models.model_output import ModelResponse
    from lighteval.tasks.requests import Doc
    from lighteval.utils.utils import remove_reasoning_tags

    text = remove_reasoning_tags(text=text, tag_pairs=[("<think>", "</think>")])
    golds = doc.choices
    if hasattr(metric, "preprocess"):
        text, golds = metric.preprocess(text), [metric.preprocess(gold) for gold in golds]
    alone = Doc(query=doc.query, choices=golds, gold_index=doc.gold_index)
    scoring = getattr(metric, "compute_score", None) or metric.compute
    scoring(doc=alone, model_response=ModelResponse(text=[text]))
    return memory[(tuple(alone.get_golds()), text)]


def label(metric: Any) -> str:
    """A metric's name with the k and n that it has, which are not always those that lighteval's own name states."""
    base, k, n = metric.metric_name.partition(":")[0], *(getattr(metric.sample_level_fn, key, None) for key in "kn")
    return base.replace("@k", f"@{k}").replace("@n", f"@{n}")


def documents(pipeline: Any) -> list[Any]:
    (docs,) = pipeline.documents_dict.values()
    return list(docs)


def message(doc: Any) -> str:
    """What lighteval would send as the user's message."""
    from lighteval.tasks.prompt_manager import PromptManager

    (only,) = PromptManager(use_chat_template=True).prepare_prompt_api(doc)
    return str(only["content"])


def question(row: Json) -> str:
    return str(row.get("problem", row.get("question", row.get("prompt"))))


def qualified_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


if __name__ == "__main__":
    main()
