"""Seeds by name: a stream of sampling is keyed by what it is for, so that none depends on another having been read."""

from __future__ import annotations

import hashlib

# Member j of a group draws from its prompt's seed + j; seeds of 62 bits leave room, and collide with no one.
_BITS = 62


def derive(seed: int, *names: int | str) -> int:
    """A 62-bit seed from the run's seed and a name such as ("rollout", 17)."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _BITS)
