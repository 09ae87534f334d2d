"""Recorded pools of groups: their files, what a run must share with one, and the source that a run learns from."""
