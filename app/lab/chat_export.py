"""A trained chat model as a folder that `baton conductor deploy` takes as it is: manifest and golden prompts.

Golden prompts are the prompts of training, cards and all, with questions of the rehearsal world in the place of the
callers' and operators' own: what is deployed carries nobody's words. Their tokens are those of the tokenizer that
trained. Their plans are the model's likeliest, where each of its tokens led by a clear margin: servers round
differently, and a close choice may come out otherwise there.
"""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from app.conductor.prompt import SUBTASK_CHARS, TEMPLATE, TOOLS
from app.conductor.protocol import Brief
from app.core.message.chat import Message, Task, Text
from app.core.plan.proposals import read_plan_text
from app.core.pool.catalog import Limits
from app.lab import manifest, reward, training_record
from app.lab.manifest import DEFAULTS, MANIFEST, OF_BASE, GoldenPrompt, Manifest
from app.lab.rollouts import Rollout, Turns, conductor_prompt
from app.lab.training_questions import Question, Rule, draw_rules

COUNT, SEED = 24, 11
CLEAR = 1.0
"""The least margin of each token of a golden plan over the next likeliest, in nats."""
OFFERED = TOOLS.partition("{")[0]
"""The text that marks a prompt with a caller's tools."""


class TrainedModel(Protocol):
    """A trained chat model."""

    def tokens(self, messages: Turns) -> list[int]:
        """Return the tokens that the model's tokenizer and chat template make of a conversation, up to where its answer
        begins."""
        ...

    def likeliest(self, messages: Turns, most: int) -> tuple[str, float]:
        """Return the model's likeliest answer of at most so many tokens, and the smallest margin among them in nats."""
        ...


class Base(Struct, frozen=True):
    """The model that is trained, as a server will know it."""

    folder: Path
    name: str
    tokenizer_sha256: str
    card: Manifest | None = None
    """Its manifest, if it has been described."""
    golden: Sequence[GoldenPrompt] = ()


def base_of(folder: Path) -> Base:
    """Describe the base in a folder. Raises `ConfigInvalid` if it holds no weights or no tokenizer that can be served.
    A base without a manifest gets the name that `baton conductor describe FOLDER --title` gives it with the folder's
    name."""
    tokenizer = manifest.tokenizer_sha256(folder)
    if (folder / MANIFEST).is_file():
        card, golden = manifest.read(folder)
        return Base(folder, card.name, tokenizer, card, golden)
    name = manifest.version(manifest.title_of(folder), manifest.weights_sha256(folder, "model"))
    return Base(folder, name, tokenizer)


class TrainingPrompts(Struct, frozen=True):
    """The prompts that training shows a model: golden prompts of that kind, the longest plan and the largest pool."""

    golden: Sequence[GoldenPrompt] = ()
    steps: int = 0
    workers: int = 0


def of_questions(questions: Sequence[Question]) -> TrainingPrompts:
    """Return what training shows over the pools of some questions."""
    pools = []
    for question in questions:
        pools.append(_Pool(question.prompt[0]["content"], len(question.workers), question.limits.steps))
    return _prompts_of_pools(pools)


def of_rollouts(rollouts: Sequence[Rollout]) -> TrainingPrompts:
    """Return what training shows over the pools of some journaled runs."""
    pools = []
    for rollout in rollouts:
        steps = max(rollout.most, rollout.steps)
        pools.append(_Pool(rollout.prompt[0]["content"], len(rollout.workers), steps))
    return _prompts_of_pools(pools)


class _Pool(NamedTuple):
    """A pool as training shows it: the conductor's system message, the number of workers and of steps."""

    system: str
    workers: int
    steps: int


def _prompts_of_pools(pools: Sequence[_Pool]) -> TrainingPrompts:
    """Return what training shows over some pools. Golden prompts are over the first different pools, in turn; none
    shows a caller's tools."""
    if not pools:
        return TrainingPrompts()
    pool_of_system = {}
    for pool in pools:
        if OFFERED not in pool.system:
            pool_of_system[pool.system] = pool
    shown_pools = list(pool_of_system.values())[:COUNT]
    golden = []
    if shown_pools:
        for rule, pool in zip(draw_rules(COUNT, SEED), cycle(shown_pools), strict=False):
            golden.append(_golden(rule, pool))
    return TrainingPrompts(golden, max([pool.steps for pool in pools]), max([pool.workers for pool in pools]))


def _golden(rule: Rule, pool: _Pool) -> GoldenPrompt:
    task = Task((Message("user", (Text(rule.conversation[0]["content"]),)),))
    user = conductor_prompt(Brief(task, (), Limits(), Limits().usd))[1]
    messages = [{"role": "system", "content": pool.system}, dict(user)]
    return GoldenPrompt(messages=messages, workers=pool.workers, steps=pool.steps)


def describe(
    folder: Path, base: Base, shown: TrainingPrompts, model: TrainedModel, most: int, **details: Any
) -> Manifest:
    """Describe the weights in a folder, an adapter of this base or a whole model, and what they answer to the golden
    prompts, which are the base's if it has some. `most`: tokens of an answer; `details`: title, world, evaluation."""
    is_adapter = (folder / manifest.WEIGHTS["adapter"]).is_file()
    facts = {**DEFAULTS, "reward": reward.VERSION, "commit": training_record.commit(), **details}
    facts |= {"steps": shown.steps, "workers": shown.workers, "template": TEMPLATE}
    if base.card is not None:
        for field in OF_BASE:
            facts[field] = getattr(base.card, field)
    title = facts.pop("title")
    if is_adapter:
        name = manifest.version(title, manifest.weights_sha256(folder, "adapter"))
        facts |= {"name": name, "kind": "adapter", "base": base.name, "tokenizer_sha256": base.tokenizer_sha256}
    else:
        name = manifest.version(title, manifest.weights_sha256(folder, "model"))
        tokenizer_sha256 = manifest.tokenizer_sha256(folder)
        facts |= {"name": name, "kind": "model", "base": name, "tokenizer_sha256": tokenizer_sha256}
    golden = [_with_answer(prompt, model, most) for prompt in base.golden or shown.golden]
    return manifest.write(folder, golden, **facts)


def _with_answer(golden: GoldenPrompt, model: TrainedModel, most: int) -> GoldenPrompt:
    """Return a golden prompt with its tokens and the model's plan; without the plan where it was a close choice."""
    turns = tuple(golden.messages)
    text, margin = model.likeliest(turns, most)
    plan = None
    if margin >= CLEAR and _is_decodable(text, golden):
        plan = text
    return golden.model_copy(update={"tokens": model.tokens(turns), "plan": plan})


def _is_decodable(text: str, golden: GoldenPrompt) -> bool:
    """Return True if a server that decodes under the schema can write exactly this."""
    steps = read_plan_text(text, list(map(str, range(golden.workers))), golden.steps)
    if steps is None or max([len(step.subtask) for step in steps]) > SUBTASK_CHARS:
        return False
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) == text
    except ValueError:
        return False


def next_steps(folder: Path, base: Base, card: Manifest) -> list[str]:
    """Return the commands that bring the model into service."""
    if card.kind == "model":
        return [f"baton conductor serve {folder}", f"baton conductor deploy conductor {folder}"]
    commands = [f"baton conductor serve {base.folder} --adapters", f"baton conductor deploy conductor {folder}"]
    if base.card is None:
        title = base.name.rpartition("@")[0]
        commands.insert(0, f"baton conductor describe {base.folder} --title {title}")
    return commands
