"""What a run will take, reckoned from its configuration: `python -m grpo_lab.plan` (docs/plan.md). Loads no model."""
