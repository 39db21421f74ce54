"""The small conductor: a Llama of `transformers` from scratch, which writes plans under a form's grammar.

The model is a `LlamaForCausalLM` whose attention has biases, so that it is saved, loaded and served as it was trained.
(Under the name of Qwen2, which computes the same, the library would load Qwen2's own tokenizer with it.) Only plan
tokens are scored, and always under the grammar's mask, in the rollout and in the loss alike. The plans of a group share
one copy of their prompt: they stand side by side behind it, and the attention mask keeps each from seeing the others.

`Tensor` is torch's: the type checker runs where torch is not installed, so this is where types end.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from app.lab import prompt
from app.lab.plan_grammar import ROLES, Form

Tensor = Any
CONTEXT = 256
"""Tokens of prompt and plan together."""
THETA = 100.0
"""The base of the rotary positions: prompts are short."""
LOOK_BACK, BACK = 4.6, 1.5
"""The strength of the first head's attention to earlier tokens, and their mean distance."""


def config(form: Form, hidden: int, layers: int, heads: int) -> LlamaConfig:
    """Return the sizes of a model for this form; `hidden` is the width of its stream."""
    return LlamaConfig(
        vocab_size=prompt.size(form),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        attention_bias=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        initializer_range=1 / math.sqrt(hidden),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=prompt.pad(form),
        pad_token_id=prompt.pad(form),
    )


class Conductor:
    """A model and the form in which it writes. Prompts are padded at their beginnings, plans at their ends."""

    def __init__(self, model: LlamaForCausalLM, form: Form = ROLES) -> None:
        self.model, self.form = model, form
        self._masks, self._transitions = masks(form), _transitions(form)

    @classmethod
    def with_random_weights(cls, sizes: LlamaConfig, seed: int, form: Form = ROLES) -> "Conductor":
        """Return a model with random weights that depend on the seed alone."""
        disable_progress_bar()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = LlamaForCausalLM(sizes)
        _initialise(model)
        return cls(model, form)

    @classmethod
    def from_folder(cls, folder: Path, form: Form = ROLES) -> "Conductor":
        """Return the model of an exported folder, in full precision."""
        disable_progress_bar()
        return cls(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), form)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by the names that checkpoints use."""
        return dict(self.model.named_parameters())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over these weights; KeyError if one is missing."""
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(weights[name])

    def copy(self) -> "Conductor":
        """Return a second conductor with weights of its own, equal to these."""
        return Conductor(copy.deepcopy(self.model), self.form)

    def scores(self, prompts: Sequence[Sequence[int]], plans: Tensor, workers: Tensor) -> Tensor:
        """Return log-probabilities of the tokens that follow each place of `plans`, under the grammar.

        `plans` is [prompts, group, length] and begins with the start token; `workers` is [prompts], the masks' rows.
        The result is [prompts, group, length, plan tokens]; illegal tokens have minus infinity.
        """
        count, group, length = plans.shape
        prompt_tokens, allowed, positions = self._place_beside(prompts, group, length)
        plan_tokens = plans.transpose(1, 2).reshape(count, length * group)
        output = self.model(
            input_ids=torch.cat([prompt_tokens, plan_tokens], dim=1),
            attention_mask=allowed,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=length * group,
        )
        states = [torch.zeros(count, group, dtype=torch.long)]
        for place in range(length):
            states.append(self._transitions[states[-1], plans[:, :, place]])
        logits = output.logits.reshape(count, length, group, -1).transpose(1, 2)
        return self._mask_logits(logits, workers, torch.stack(states[1:], dim=-1))

    def write(self, prompts: Sequence[Sequence[int]], workers: Tensor, group: int, generator: Tensor | None) -> Tensor:
        """Write `group` plans for each prompt, sampled, or the most likely without a generator: [prompts, group,
        longest].

        What follows a plan's end token is 0.
        """
        plans = torch.zeros(len(workers), group, self.form.longest, dtype=torch.long)
        with torch.no_grad():
            tokens, allowed, positions = self._place_beside(prompts, group, self.form.longest)
            cached_length, cache = 0, None
            states = torch.zeros(len(workers), group, dtype=torch.long)
            ended = torch.zeros(len(workers), group, dtype=torch.bool)
            for place in range(1, self.form.longest):
                tokens = torch.cat([tokens, plans[:, :, place - 1]], dim=1)
                output = self.model(
                    input_ids=tokens[:, cached_length:],
                    attention_mask=allowed[:, :, cached_length : tokens.shape[1], : tokens.shape[1]],
                    position_ids=positions[:, cached_length : tokens.shape[1]],
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=group,
                )
                cached_length, cache = tokens.shape[1], output.past_key_values
                states = self._transitions[states, plans[:, :, place - 1]]
                scores = self._mask_logits(output.logits[:, :, None], workers, states[:, :, None])[:, :, 0]
                chosen = _sample_tokens(scores, generator)
                plans[:, :, place] = chosen.masked_fill(ended, 0)
                ended |= chosen == 2
                if bool(ended.all()):
                    break
        return plans

    def _place_beside(self, prompts: Sequence[Sequence[int]], group: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return prompts with room behind each for `length` places of `group` plans, place by place: the prompts'
        tokens, and of all places the attention mask [prompts, 1, all, all] and the positions [1, all]."""
        longest, pad = max(map(len, prompts)), prompt.pad(self.form)
        prompt_tokens = torch.tensor([[pad] * (longest - len(tokens)) + list(tokens) for tokens in prompts])
        size = longest + length * group
        allowed = torch.ones(size, size, dtype=torch.bool).tril().repeat(len(prompts), 1, 1)
        allowed[:, :, :longest] &= (prompt_tokens != pad)[:, None, :]
        own = torch.eye(group, dtype=torch.bool).repeat(length, length)
        allowed[:, longest:, longest:] &= own
        allowed |= torch.eye(size, dtype=torch.bool)
        behind = longest + torch.arange(length).repeat_interleave(group)
        return prompt_tokens, allowed[:, None], torch.cat([torch.arange(longest), behind])[None]

    def _mask_logits(self, logits: Tensor, workers: Tensor, states: Tensor) -> Tensor:
        """Return log-probabilities under the grammar in these states, which are [prompts, group, length]."""
        allowed = self._masks[workers[:, None, None], states]
        return logits[..., : len(self.form.tokens)].masked_fill(~allowed, float("-inf")).log_softmax(-1)


def masks(form: Form = ROLES) -> Tensor:
    """Return the legal tokens: [rows, states, tokens]. A row is a number of workers, SLOTS more for a second round's
    plan in the form `roles`; a state is the grammar's."""
    table = torch.zeros(form.rows, form.states, len(form.tokens), dtype=torch.bool)
    for row in range(1, form.rows):
        for state in range(form.states):
            table[row, state, list(form.legal(state, row))] = True
    return table


def _transitions(form: Form) -> Tensor:
    """Return the state after each token in each state: [states, tokens]; of tokens that are illegal there, any."""
    rows = []
    for state in range(form.states):
        rows.append([form.follow(state, token) for token in range(len(form.tokens))])
    return torch.tensor(rows)


def _sample_tokens(scores: Tensor, generator: Tensor | None) -> Tensor:
    """Return a token for each row of log-probabilities: a sample, or the most likely one without a generator."""
    if generator is None:
        return scores.argmax(-1)
    sampled = torch.multinomial(scores.exp().flatten(0, 1), 1, generator=generator)
    return sampled.reshape(scores.shape[:2])


def _initialise(model: LlamaForCausalLM) -> None:
    """Make two changes to the library's random weights, both of which training may undo.

    What a layer adds to the stream is scaled down by the depth. One head of the first layer looks at the two tokens
    before: a card's words stand just before its ordinal, and to find that out from rewards alone takes thousands of
    steps.
    """
    attention = model.model.layers[0].self_attn
    half = attention.head_dim // 2
    sharp = torch.arange(half) < half // 2
    turns = THETA ** (-torch.arange(half).float() / half)
    deep = 1 / math.sqrt(2 * len(model.model.layers))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(deep)
            layer.mlp.down_proj.weight.mul_(deep / math.sqrt(2))
        attention.q_proj.bias[:half] = LOOK_BACK * sharp
        attention.k_proj.bias[:half] = LOOK_BACK * sharp * (BACK * turns).cos()
        attention.k_proj.bias[half : 2 * half] = LOOK_BACK * sharp * (BACK * turns).sin()
