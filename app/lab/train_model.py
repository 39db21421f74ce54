"""The small conductor: a decoder-only transformer in the shape of Qwen2, from scratch, on torch.

Parameters are a flat dict of tensors under the names that Qwen2's checkpoints use, and the forward pass is a function
of them. Only plan tokens are scored, and always under the grammar's mask, in rollout and in the loss alike. A group of
rollouts shares the keys and values of its prompt, with gradients.

`Tensor` is torch's: the type checker runs where torch is not installed, so this is where types end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from app.lab.plan_grammar import ROLES, Form

Tensor = Any
Weights = dict[str, Tensor]
NORM = 1e-6
CONTEXT = 256
"""Tokens of prompt and plan together."""
LOOK_BACK, BACK = 4.6, 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model."""

    vocabulary: int
    hidden: int = 96
    layers: int = 3
    heads: int = 3
    inner: int = 192
    theta: float = 100.0

    @property
    def head(self) -> int:
        """The size of one head."""
        return self.hidden // self.heads


def initial(shape: Shape, seed: int) -> Weights:
    """Fresh parameters."""
    generator = torch.Generator(torch.empty(0).device).manual_seed(seed)

    def drawn(*size: int, spread: float = 0.02) -> Tensor:
        return torch.randn(size, generator=generator) * spread

    hidden, inner = shape.hidden, shape.inner
    weights = {"model.embed_tokens.weight": drawn(shape.vocabulary, hidden, spread=1 / math.sqrt(hidden))}
    for n in range(shape.layers):
        layer = f"model.layers.{n}."
        for name in "qkv":
            weights[f"{layer}self_attn.{name}_proj.weight"] = drawn(hidden, hidden, spread=1 / math.sqrt(hidden))
            weights[f"{layer}self_attn.{name}_proj.bias"] = torch.zeros(hidden)
        deep = 1 / math.sqrt(2 * shape.layers)
        weights[f"{layer}self_attn.o_proj.weight"] = drawn(hidden, hidden, spread=deep / math.sqrt(hidden))
        weights[f"{layer}mlp.gate_proj.weight"] = drawn(inner, hidden, spread=1 / math.sqrt(hidden))
        weights[f"{layer}mlp.up_proj.weight"] = drawn(inner, hidden, spread=1 / math.sqrt(hidden))
        weights[f"{layer}mlp.down_proj.weight"] = drawn(hidden, inner, spread=deep / math.sqrt(inner))
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.ones(hidden)
    _look_back(shape, weights)
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


def _look_back(shape: Shape, weights: Weights) -> None:
    """Let one head of the first layer begin by looking at the two tokens before: a card's words stand just before its
    ordinal, and finding that out from rewards alone takes thousands of steps. Biases only; training may undo it."""
    half = shape.head // 2
    sharp = torch.arange(half) < half // 2
    turns = shape.theta ** (-torch.arange(half).float() / half)
    query, key = (weights[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qk")
    query[:half] = LOOK_BACK * sharp
    key[:half] = LOOK_BACK * sharp * (BACK * turns).cos()
    key[half : 2 * half] = LOOK_BACK * sharp * (BACK * turns).sin()


def masks(form: Form = ROLES) -> Tensor:
    """By the mask's row (the number of workers; in `roles`, of a second round's plan, SLOTS more) and the grammar's
    state, which tokens are legal: [rows, states, tokens]."""
    table = torch.zeros(form.rows, form.states, len(form.tokens), dtype=torch.bool)
    for row in range(1, form.rows):
        for state in range(form.states):
            table[row, state, list(form.legal(state, row))] = True
    return table


def follows(form: Form) -> Tensor:
    """The state after each token in each state: [states, tokens]; of tokens that are illegal there, any."""
    return torch.tensor(
        [[form.follow(state, token) for token in range(len(form.tokens))] for state in range(form.states)]
    )


@dataclass(slots=True)
class Read:
    """A batch of prompts as the model has read it: keys and values by layer, which of them count, the length."""

    keys: list[Tensor]
    values: list[Tensor]
    counts: Tensor
    length: int


class Conductor:
    """A model under its parameters. Prompts are padded at their beginnings, plans at their ends."""

    def __init__(self, shape: Shape, weights: Weights, form: Form = ROLES) -> None:
        self.shape, self.weights, self.form = shape, weights, form
        self._masks, self._follows = masks(form), follows(form)
        steps = torch.arange(CONTEXT).float()[:, None]
        half = shape.head // 2
        angles = steps * shape.theta ** (-torch.arange(half).float() / half)
        self._cos, self._sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def read(self, prompts: Sequence[Sequence[int]], pad: int) -> Read:
        """Read prompts; with gradients where they are on."""
        length = max(map(len, prompts))
        padded = torch.tensor([[pad] * (length - len(one)) + list(one) for one in prompts])
        counts = padded != pad
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        allowed = (causal[None] & counts[:, None, :]) | torch.eye(length, dtype=torch.bool)[None]
        hidden = self._embedded(padded)
        found = Read([], [], counts, length)
        for n in range(self.shape.layers):
            query, key, value = self._heads(n, hidden, 0)
            found.keys.append(key)
            found.values.append(value)
            if n == self.shape.layers - 1:
                break
            seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed[:, None])
            hidden = self._rest(n, hidden, seen)
        return found

    def scores(self, read: Read, plans: Tensor, workers: Tensor) -> Tensor:
        """Log-probabilities of the tokens that follow each place of `plans`, under the grammar.

        `plans` is [prompts, group, length] and begins with the start token; `workers` is [prompts], the masks' rows.
        The result is [prompts, group, length, plan tokens]; illegal tokens have minus infinity.
        """
        prompts, group, length = plans.shape
        hidden = self._embedded(plans.reshape(prompts * group, length))
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        for n in range(self.shape.layers):
            query, key, value = self._heads(n, hidden, read.length)
            seen = self._seen(read, n, query, key, value, causal, group)
            hidden = self._rest(n, hidden, seen)
        logits = self._logits(hidden).reshape(prompts, group, length, -1)
        states = [torch.zeros(prompts, group, dtype=torch.long)]
        for place in range(length):
            states.append(self._follows[states[-1], plans[:, :, place]])
        return self._masked(logits, workers, torch.stack(states[1:], -1))

    def write(self, read: Read, workers: Tensor, group: int, generator: Tensor | None) -> Tensor:
        """`group` plans for each prompt, sampled, or the most likely without a generator: [prompts, group, longest].

        What follows a plan's end token is 0.
        """
        prompts = len(workers)
        plans = torch.zeros(prompts, group, self.form.longest, dtype=torch.long)
        states = torch.zeros(prompts, group, dtype=torch.long)
        keys: list[Tensor | None] = [None] * self.shape.layers
        values: list[Tensor | None] = [None] * self.shape.layers
        ended = torch.zeros(prompts, group, dtype=torch.bool)
        for place in range(1, self.form.longest):
            hidden = self._embedded(plans[:, :, place - 1].reshape(-1, 1))
            for n in range(self.shape.layers):
                query, key, value = self._heads(n, hidden, read.length + place - 1)
                keys[n] = key = key if keys[n] is None else torch.cat([keys[n], key], 2)
                values[n] = value = value if values[n] is None else torch.cat([values[n], value], 2)
                open_ = torch.ones(1, place, dtype=torch.bool)
                hidden = self._rest(n, hidden, self._seen(read, n, query, key, value, open_, group))
            logits = self._logits(hidden).reshape(prompts, group, 1, -1)
            states = self._follows[states, plans[:, :, place - 1]]
            scores = self._masked(logits, workers, states[:, :, None])[:, :, 0]
            if generator is None:
                chosen = scores.argmax(-1)
            else:
                chosen = torch.multinomial(scores.exp().flatten(0, 1), 1, generator=generator)
                chosen = chosen.reshape(prompts, group)
            plans[:, :, place] = chosen.masked_fill(ended, 0)
            ended |= chosen == 2
            if bool(ended.all()):
                break
        return plans

    def _seen(
        self, read: Read, n: int, query: Tensor, key: Tensor, value: Tensor, causal: Tensor, group: int
    ) -> Tensor:
        """Attention to the group's prompt and the plan so far; queries are [prompts * group, heads, length, head]."""
        heads, head = self.shape.heads, self.shape.head
        prompts, length = len(read.counts), query.shape[2]
        wide = query.reshape(prompts, group, heads, length, head).transpose(1, 2).reshape(prompts, heads, -1, head)
        before = (wide @ read.keys[n].transpose(2, 3)).masked_fill(~read.counts[:, None, None], float("-inf"))
        before = (
            before.reshape(prompts, heads, group, length, -1).transpose(1, 2).reshape(-1, heads, length, read.length)
        )
        own = (query @ key.transpose(2, 3)).masked_fill(~causal, float("-inf"))
        odds = torch.cat([before, own], -1).div(math.sqrt(head)).softmax(-1)
        first = odds[..., : read.length].reshape(prompts, group, heads, length, -1).transpose(1, 2)
        seen = first.reshape(prompts, heads, group * length, -1) @ read.values[n]
        seen = seen.reshape(prompts, heads, group, length, head).transpose(1, 2).reshape(-1, heads, length, head)
        return seen + odds[..., read.length :] @ value

    def _embedded(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weights["model.embed_tokens.weight"])

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = _normed(hidden, self.weights["model.norm.weight"])
        return functional.linear(normed, self.weights["model.embed_tokens.weight"][: len(self.form.tokens)])

    def _masked(self, logits: Tensor, workers: Tensor, states: Tensor) -> Tensor:
        """Under the grammar, in these states: [prompts, group, length]. After a plan's end nothing is asked."""
        allowed = self._masks[workers[:, None, None], states]
        return logits.masked_fill(~allowed, float("-inf")).log_softmax(-1)

    def _heads(self, n: int, hidden: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        layer = f"model.layers.{n}."
        normed = _normed(hidden, self.weights[f"{layer}input_layernorm.weight"])
        query, key, value = (
            functional.linear(
                normed,
                self.weights[f"{layer}self_attn.{name}_proj.weight"],
                self.weights[f"{layer}self_attn.{name}_proj.bias"],
            )
            .reshape(*hidden.shape[:2], self.shape.heads, self.shape.head)
            .transpose(1, 2)
            for name in "qkv"
        )
        return self._turned(query, start), self._turned(key, start), value

    def _turned(self, vectors: Tensor, start: int) -> Tensor:
        """Rotary positions."""
        length = vectors.shape[2]
        first, second = vectors.chunk(2, -1)
        across = torch.cat([-second, first], -1)
        return vectors * self._cos[start : start + length] + across * self._sin[start : start + length]

    def _rest(self, n: int, hidden: Tensor, seen: Tensor) -> Tensor:
        layer, weights = f"model.layers.{n}.", self.weights
        joined = seen.transpose(1, 2).reshape(hidden.shape)
        hidden = hidden + functional.linear(joined, weights[f"{layer}self_attn.o_proj.weight"])
        normed = _normed(hidden, weights[f"{layer}post_attention_layernorm.weight"])
        gate = functional.silu(functional.linear(normed, weights[f"{layer}mlp.gate_proj.weight"]))
        up = functional.linear(normed, weights[f"{layer}mlp.up_proj.weight"])
        return hidden + functional.linear(gate * up, weights[f"{layer}mlp.down_proj.weight"])


def _normed(hidden: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(hidden, weight.shape, weight, NORM)
