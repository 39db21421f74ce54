"""A trained chat model as a folder that `baton conductor deploy` takes as it is: manifest and golden prompts.

Golden prompts are the prompts of training, cards and all, with questions of the rehearsal world in the place of the
callers' and operators' own: what is deployed carries nobody's words. Their tokens are those of the tokenizer that
trained. Their plans are the model's likeliest, where each of its tokens led by a clear margin: servers round
differently, and a close choice may come out otherwise there.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.conductor.prompt import SUBTASK_CHARS, TEMPLATE, TOOLS
from app.conductor.protocol import Brief
from app.core.message.chat import Message, Task, Text
from app.core.plan.workflow import PlanReader, by_ordinal
from app.core.pool.catalog import Limits
from app.errors import PlanRejected
from app.lab import manifest, reward, training_record
from app.lab.manifest import DEFAULTS, MANIFEST, OF_BASE, Golden, Manifest
from app.lab.rollouts import Rollout, Turns, conductor_prompt
from app.lab.training_questions import Question, Rule, draw_rules

COUNT, SEED = 24, 11
CLEAR = 1.0
"""The least margin of each token of a golden plan over the next likeliest, in nats."""
OFFERED = TOOLS.partition("{")[0]
"""The text that marks a prompt with a caller's tools."""


class Pupil(Protocol):
    """A trained chat model."""

    def tokens(self, messages: Turns) -> list[int]:
        """Return the tokens that the model's tokenizer and chat template make of a conversation, up to where its answer
        begins."""
        ...

    def likeliest(self, messages: Turns, most: int) -> tuple[str, float]:
        """Return the model's likeliest answer of at most so many tokens, and the smallest margin among them in nats."""
        ...


@dataclass(frozen=True, slots=True)
class Base:
    """The model that is trained, as a server will know it."""

    folder: Path
    name: str
    tokenizer_sha256: str
    card: Manifest | None = None
    """Its manifest, if it has been described."""
    golden: Sequence[Golden] = ()


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


@dataclass(frozen=True, slots=True)
class Reach:
    """The prompts that training shows a model: golden prompts of that kind, the longest plan and the largest pool."""

    golden: Sequence[Golden] = ()
    steps: int = 0
    workers: int = 0


def of_questions(questions: Sequence[Question]) -> Reach:
    """Return the reach of training over the pools of some questions."""
    pools = []
    for question in questions:
        pools.append((question.prompt[0], len(question.workers), question.limits.steps))
    return _reach_of_pools(pools)


def of_rollouts(rollouts: Sequence[Rollout]) -> Reach:
    """Return the reach of training over the pools of some journaled runs."""
    return _reach_of_pools(
        [(rollout.prompt[0], len(rollout.workers), max(rollout.most, rollout.steps)) for rollout in rollouts]
    )


def _reach_of_pools(pools: Sequence[tuple[Mapping[str, str], int, int]]) -> Reach:
    """Return the reach over some pools. Golden prompts are over the first different pools, in turn; none shows a
    caller's tools."""
    pool_of_system = {}
    for turn, workers, steps in pools:
        if OFFERED not in turn["content"]:
            pool_of_system[turn["content"]] = (workers, steps)
    systems = list(pool_of_system.items())[:COUNT]
    rules = draw_rules(COUNT, SEED) if systems else []
    golden = [_golden(rule, *systems[place % len(systems)]) for place, rule in enumerate(rules)]
    return Reach(golden, max((pool[2] for pool in pools), default=0), max((pool[1] for pool in pools), default=0))


def _golden(rule: Rule, system: str, pool: tuple[int, int]) -> Golden:
    task = Task((Message("user", (Text(rule.conversation[0]["content"]),)),))
    user = conductor_prompt(Brief(task, (), Limits(), Limits().usd))[1]
    return Golden(messages=[{"role": "system", "content": system}, dict(user)], workers=pool[0], steps=pool[1])


def describe(folder: Path, base: Base, reach: Reach, pupil: Pupil, most: int, **details: Any) -> Manifest:
    """Describe the weights in a folder, an adapter of this base or a whole model, and what they answer to the golden
    prompts, which are the base's if it has some. `most`: tokens of an answer; `details`: title, world, evaluation."""
    adapter = (folder / manifest.WEIGHTS["adapter"]).is_file()
    kind = "adapter" if adapter else "model"
    facts = {**DEFAULTS, "reward": reward.VERSION, "commit": training_record.commit(), **details}
    facts |= {"steps": reach.steps, "workers": reach.workers}
    if base.card is not None:
        facts |= {name: getattr(base.card, name) for name in OF_BASE}
    name = manifest.version(facts.pop("title"), manifest.weights_sha256(folder, kind))
    facts |= {"name": name, "kind": kind, "base": base.name if adapter else name, "template": TEMPLATE}
    facts["tokenizer_sha256"] = base.tokenizer_sha256 if adapter else manifest.tokenizer_sha256(folder)
    return manifest.write(
        folder, [_with_answer(golden, pupil, most) for golden in base.golden or reach.golden], **facts
    )


def _with_answer(golden: Golden, pupil: Pupil, most: int) -> Golden:
    turns = tuple(golden.messages)
    text, ahead = pupil.likeliest(turns, most)
    sure = ahead >= CLEAR and _is_decodable(text, golden)
    return golden.model_copy(update={"tokens": pupil.tokens(turns), "plan": text if sure else None})


def _is_decodable(text: str, golden: Golden) -> bool:
    """Return True if a server that decodes under the schema can write exactly this."""
    reader = PlanReader(by_ordinal([str(n) for n in range(golden.workers)]), golden.steps)
    try:
        steps = (*reader.feed(text), *reader.finish())
        tight = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except (PlanRejected, ValueError):
        return False
    return tight == text and all(len(step.subtask) <= SUBTASK_CHARS for step in steps)


def next_steps(folder: Path, base: Base, made: Manifest) -> list[str]:
    """Return the commands that bring the model into service."""
    if made.kind == "model":
        return [f"baton conductor serve {folder}", f"baton conductor deploy conductor {folder}"]
    title = base.name.rpartition("@")[0]
    described = [] if base.card is not None else [f"baton conductor describe {base.folder} --title {title}"]
    return [*described, f"baton conductor serve {base.folder} --adapters", f"baton conductor deploy conductor {folder}"]
