"""Weights laid in a folder for an engine in another process: files of one bucket each, so that neither side holds more
than a bucket beside the model. The folder of the last version stays: an engine that starts again reads it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from grpo_lab.weights import Weights

# Bytes of a file, and so of the extra memory that a sync takes. One weight larger than this is a file of its own.
BUCKET_BYTES = 256 * 2**20


def write_buckets(weights: Weights, folder: Path, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Write the stream as bucket_00000.safetensors, bucket_00001.safetensors, ..."""
    from safetensors.torch import save_file

    bucket: dict[str, Tensor] = {}
    held = count = 0
    for name, tensor in weights:
        if bucket and held + tensor.nbytes > bucket_bytes:
            save_file(bucket, folder / f"bucket_{count:05d}.safetensors")
            bucket, held, count = {}, 0, count + 1
        # A copy: the tensor is valid only until the next is asked for, and tied weights may not share memory in a file.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
    if bucket:
        save_file(bucket, folder / f"bucket_{count:05d}.safetensors")


def read_buckets(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The stream that `write_buckets` wrote, on the CPU.

    Raises:
        FileNotFoundError: none is there, as where two machines do not share the folder.
    """
    from safetensors.torch import load_file

    files = sorted(folder.glob("bucket_*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"no weights in {folder}: rollout.vllm.weights_dir must name a folder that both sides see"
        )
    for file in files:
        yield from load_file(file).items()


class WeightFolder:
    """Numbered subfolders of `root`, one a sync, made by the first sync and removed at the end. `latest` is the last
    one kept. What a killed run has left there is removed as well, so that `root` must be one run's alone."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._count = 0
        self.latest: Path | None = None

    def write(self, weights: Weights) -> Path:
        """Lay the stream in a new subfolder.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        if self._count == 0:
            shutil.rmtree(self._root, ignore_errors=True)
        folder = self._root / f"{self._count:06d}"
        self._count += 1
        folder.mkdir(parents=True)
        write_buckets(weights, folder)
        return folder

    def keep(self, folder: Path) -> None:
        """The weights in `folder` are in use: those before them are not needed any more."""
        if self.latest is not None:
            shutil.rmtree(self.latest, ignore_errors=True)
        self.latest = folder

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
