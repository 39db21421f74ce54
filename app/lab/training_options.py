"""The options of training a chat model to conduct, with their defaults. Imports no torch."""

import math
from typing import Any, Literal

import msgspec
from msgspec import Struct

from app.lab.world import Weights

Vllm = Literal["none", "colocate", "server"]
FULL_RATE, LORA_RATE = 1e-6, 1e-5
FULL_IMITATION, LORA_IMITATION = 1e-5, 1e-4


class Recipe(Struct, frozen=True):
    """The options of one training run. The figures are those for a model of seven billion parameters and LoRA."""

    model: str
    """A folder, or a name that Hugging Face knows."""
    seed: int = 0
    lora: int = 32
    """Rank of the adapters on all linear layers; 0: all weights are trained."""
    steps: int = 100
    """Steps of policy gradients."""
    questions: int = 16
    """Questions of each step."""
    group: int = 16
    """Plans for each question."""
    micro: int = 4
    """Plans that pass through the model at a time."""
    rate: float | None = None
    completion: int = 1_024
    """Most tokens of a plan."""
    ramp: float = 0.3
    """Share of the steps after which cost counts in full."""
    every: int = 20
    """Steps between checkpoints, and between looks at the held-out questions."""
    held_out: int = 128
    """Questions that are not learned from, at most a tenth of all; 0: none."""
    patience: int = 3
    """Looks at the held-out questions without a better reward, after which training ends."""
    vllm: Vllm = "none"
    vllm_url: str = ""
    epochs: int = 2
    """Epochs of imitation."""
    batch: int = 8
    """Examples of each step of imitation."""
    imitation_rate: float | None = None
    beta: float = 0.3
    """The temperature of advantage-weighted regression: the advantage that counts e times as much as none."""
    cap: float = 20.0
    """Its greatest weight before scaling."""
    weights: Weights = Weights()

    @property
    def policy_rate(self) -> float:
        """Return the learning rate of policy gradients."""
        return self.rate or (LORA_RATE if self.lora else FULL_RATE)

    @property
    def warm_rate(self) -> float:
        """Return the learning rate of imitation."""
        return self.imitation_rate or (LORA_IMITATION if self.lora else FULL_IMITATION)

    def held_out_batch(self, asked: int) -> int:
        """Return how many of `asked` held-out questions are planned for at a time, at most `micro`. TRL's reward is the
        mean of its batches' means, in which the questions of a smaller last batch would count for more."""
        return math.ceil(asked / math.ceil(asked / self.micro))

    def as_json(self) -> dict[str, Any]:
        """Return all options, for the card and to tell one recipe from another."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields
