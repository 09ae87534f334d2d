"""Tracking: metrics, evaluations, rollouts and provenance in the run folder, mirrored to the terminal and to W&B."""

from grpo_lab.tracking.tracker import Tracker, forward_warnings

__all__ = ["Tracker", "forward_warnings"]
