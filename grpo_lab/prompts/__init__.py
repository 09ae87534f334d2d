"""Data sets and prompts: rows become problems, problems become prompts, prompts become an endless seeded stream."""

from __future__ import annotations

from grpo_lab.prompts.loading import load_problems
from grpo_lab.prompts.mixture import fitting_warnings
from grpo_lab.prompts.render import Rendered, render
from grpo_lab.prompts.split import Split
from grpo_lab.prompts.stream import PromptStream

__all__ = ["PromptStream", "Rendered", "Split", "fitting_warnings", "load_problems", "render"]
