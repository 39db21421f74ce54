"""A LoRA adapter of the trained checkpoint that changes some of its plans: run with an interpreter that has torch.

python -m tests.vllm.adapter BASE OUT
"""

import sys
from pathlib import Path

import torch

from app.lab import export
from app.lab.train_loop import Recipe
from app.lab.world import Weights

SPREAD, RANK = 0.03, 16


def main(base: Path, out: Path) -> None:
    """Shake the projections a little, and export what that has changed."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(7)
    weights = {
        name: tensor + (SPREAD * torch.randn(tensor.shape, generator=random) if name.endswith("_proj.weight") else 0)
        for name, tensor in export.load_conductor(base).weights.items()
    }
    shaken = export.TrainingResult(Recipe(), Weights(), weights, (base / "card.json").read_text())
    adapter = export.export_adapter(shaken, base, out, "shaken", RANK)
    print(adapter.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
