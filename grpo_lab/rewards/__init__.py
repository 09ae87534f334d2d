"""Rewards: verdicts on responses against gold answers, judged in processes of their own with real time limits."""

from grpo_lab.rewards.judge import judge_exact, judge_math, reward

__all__ = ["judge_exact", "judge_math", "reward"]
