"""Scores of a policy on problems with known answers: inside the loop, and by `python -m grpo_lab.evaluate`."""
