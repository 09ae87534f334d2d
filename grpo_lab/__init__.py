"""grpo_lab: off-policy reinforcement learning with verifiable rewards on language models."""

__version__ = "0.1.0"
