"""Tracking: metrics, evaluations, rollouts and provenance in the run folder, mirrored to the terminal and to W&B."""

from grpo_lab.tracking.quiet import QuietTracker
from grpo_lab.tracking.tracker import Tracker, forward_warnings

__all__ = ["QuietTracker", "Tracker", "forward_warnings"]
