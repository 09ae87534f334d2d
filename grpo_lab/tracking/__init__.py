"""Tracking: metrics, evaluations, rollouts and provenance in the run folder, mirrored to the terminal and to W&B."""

from grpo_lab.tracking.tracker import Tracker

__all__ = ["Tracker"]
