"""What runs inside vLLM's own workers: reading weights from a folder. vLLM imports it by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from grpo_lab.rollout.vllm.folder import read_buckets
from grpo_lab.weights import digest


class WeightReader:
    """Mixed into vLLM's worker class, whose `reload_weights` it calls."""

    reload_weights: Any

    def load_weight_folder(self, folder: str) -> dict[str, str]:
        """Replace all weights by those in the folder, bucket by bucket. Returns the digest of each as it arrived.

        vLLM then fuses and packs what it was given. The digests say nothing of that; scoring what it samples does.
        """
        digests: dict[str, str] = {}

        def arriving() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read_buckets(Path(folder)):
                digests[name] = digest(name, tensor)
                yield name, tensor

        self.reload_weights(weights_iterator=arriving())
        return digests
