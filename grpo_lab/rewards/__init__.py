"""Rewards: verdicts on responses against gold answers, judged in processes of their own with real time limits."""

from grpo_lab.rewards.judge import judge_exact, judge_math, reward
from grpo_lab.rewards.pool import Pending, Verifier

__all__ = ["Pending", "Verifier", "judge_exact", "judge_math", "reward"]
