"""`baton train --backend trl`: policy gradients over a chat model's plans, by TRL's GRPO; and `--backend awr`.

The settings are those of Dr. GRPO (arXiv 2503.20783): no division by the group's spread, a constant normaliser, no KL;
a wider upper clip (DAPO, arXiv 2503.14476); one update per batch. Plans are rolled out without a grammar, and the
reward teaches their form: a grammar in the rollout alone would make the importance ratios wrong. The service decodes
under the schema.

Every so many steps the conductor is judged by questions that it does not learn from. Training ends when it no longer
gets better there, and the weights that were best there are kept. Their reward there is too high, since they were chosen
by it: at the end they are judged once more, by questions that chose nothing.

In the folder: `adapter` or `model`, `checkpoints` (to go on from), `curve.csv`, `curve.png`, the same for `imitation`,
and `card.json`. `adapter` or `model` has a manifest and golden prompts: `baton conductor deploy` takes it as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from msgspec import Struct
from msgspec.structs import asdict
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from app.core.pool.catalog import Worker
from app.errors import ConfigInvalid
from app.lab import chat_export, manifest, reward, training_record, world
from app.lab.manifest import Manifest
from app.lab.offpolicy import effective_size
from app.lab.plan_execution import Place, PlanCache
from app.lab.plan_rewards import Scorer
from app.lab.rollouts import SCHEMA, Example
from app.lab.train_chat import PLAIN, ChatModel, imitate, load_model, model_folder, save
from app.lab.training_options import Recipe
from app.lab.training_questions import Question

COLUMNS = ("reward", "right", "malformed", "outage", "held_out")
HELD_OUT = COLUMNS[-1]
"""The mean reward on the held-out questions, by the whole weights of cost and wait. The first row of a curve, that of
step 0, has nothing else: it is what the model reached before policy gradients."""
LAST = 10
"""Steps of policy gradients that the manifest's figures are the means of."""


class Order(Struct, frozen=True):
    """A training run: what to train, and the folder for its results. Without questions it is imitation alone."""

    out: Path
    recipe: Recipe
    questions: Sequence[Question] = ()
    asked: Sequence[Question] = ()
    """Held-out questions. The weights that are kept are those with the best reward on them."""
    fresh: Sequence[Question] = ()
    """Further held-out questions, by which nothing is chosen: the weights that are kept are judged by them."""
    place: Place | None = None
    cache: Path | None = None
    """The file of plans that were carried out before."""
    examples: Sequence[Example] = ()
    """To imitate first, or alone."""
    held_out: Sequence[Example] = ()
    origin: Mapping[str, Any] = {}
    """The origin of questions, examples and pool, for the card."""
    shown: chat_export.TrainingPrompts = chat_export.TrainingPrompts()
    """For the manifest."""
    threads: int = 1


def train(order: Order, say: Callable[[str], None]) -> Path:
    """Train, or go on from the folder's last checkpoint; the folder of the weights."""
    torch.set_num_threads(order.threads)
    training_record.same_or_new(order.out, _identity(order))
    model = load_model(order.recipe)
    base = chat_export.base_of(model_folder(order.recipe.model))
    last: str | None = None
    if (order.out / "checkpoints").is_dir():
        last = get_last_checkpoint(str(order.out / "checkpoints"))
    if order.examples and last is None:
        rows = imitate(model, order.examples, order.held_out, order.recipe, say)
        training_record.write_curve(order.out, rows, {"imitation": "imitation"}, "imitation")
    scorer: Scorer | None = None
    history: list[dict[str, Any]] = []
    fresh_reward: float | None = None
    if order.questions and order.place is not None:
        scorer = _scorer(order, order.place, say)
        if last is None:
            say(f"{order.recipe.steps} steps of policy gradients")
        else:
            say(f"going on from {Path(last).name}")
        history, fresh_reward = _train_policy(model, order, scorer, last)
        training_record.write_curve(order.out, history, dict(zip(COLUMNS, COLUMNS, strict=True)))
    folder = save(model, order.out)
    card = _write_manifest(order, folder, base, model, history, fresh_reward)
    training_record.write_card(order.out, _card(order, folder, scorer))
    say("\n  ".join([f"saved {folder}: {card.name}; next:", *chat_export.next_steps(folder, base, card)]))
    return folder


def _scorer(order: Order, place: Place, say: Callable[[str], None]) -> Scorer:
    """Return the rewards of the order's questions, the held-out ones last."""
    cache = None
    if order.cache is not None:
        cache = PlanCache(order.cache)
    return Scorer(
        questions=(*order.questions, *order.asked, *order.fresh),
        place=place,
        weights=order.recipe.weights,
        ramp=order.recipe.ramp,
        tell=say,
        held_out=len(order.asked) + len(order.fresh),
        cache=cache,
    )


def _write_manifest(
    order: Order,
    folder: Path,
    base: chat_export.Base,
    model: ChatModel,
    history: Sequence[Mapping[str, Any]],
    fresh_reward: float | None,
) -> Manifest:
    """Write the manifest, with what is known of how good the model is."""
    last = [row for row in history if "reward" in row][-LAST:]
    evaluation: dict[str, Any] = {}
    if last:
        gradients: dict[str, Any] = {"steps": len(last)}
        for name in COLUMNS[:-1]:
            gradients[name] = round(sum([row[name] for row in last]) / len(last), 6)
        evaluation["policy gradients"] = gradients
    looks = {row["step"]: round(row[HELD_OUT], 6) for row in history if HELD_OUT in row}
    start = looks.pop(0, None)
    if looks:
        best = {"questions": len(order.asked), "reward": max(looks.values()), "best_of": len(looks), "start": start}
        evaluation["held-out questions"] = best
    if fresh_reward is not None:
        evaluation["fresh questions"] = {"questions": len(order.fresh), "reward": round(fresh_reward, 6)}
    if order.examples:
        evaluation["imitation"] = _imitation_figures(order)
    world_version = ""
    if order.origin.get("questions") == world.VERSION:
        world_version = world.VERSION
    return chat_export.describe(
        folder,
        base,
        order.shown,
        model,
        order.recipe.completion,
        title=manifest.title_of(order.out),
        world=world_version,
        evaluation=evaluation,
    )


def _train_policy(
    model: ChatModel, order: Order, scorer: Scorer, last: str | None
) -> tuple[list[dict[str, Any]], float | None]:
    """Train with policy gradients; return the curve, from the first step on, and the reward on the fresh questions of
    the weights that are kept, None if there are none."""
    eval_dataset = None
    if order.asked:
        eval_dataset = _data(order.asked, len(order.questions))
    trainer = GRPOTrainer(
        model=model.model,
        reward_funcs=scorer.executor_reward,
        args=GRPOConfig(
            **grpo_settings(order.recipe, order.out, asked=len(order.asked)),
            eval_on_start=bool(order.asked) and last is None,
        ),
        train_dataset=_data(order.questions, 0),
        eval_dataset=eval_dataset,
        processing_class=model.tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Collapse(scorer))
    if order.asked:
        trainer.add_callback(EarlyStoppingCallback(order.recipe.patience))
    trainer.train(resume_from_checkpoint=last)
    curve = _curve(trainer.state.log_history)
    if not order.fresh:
        return curve, None
    trainer.args.per_device_eval_batch_size = order.recipe.held_out_batch(len(order.fresh))
    judged = trainer.evaluate(_data(order.fresh, len(order.questions) + len(order.asked)))
    return curve, judged["eval_reward"]


def _data(questions: Sequence[Question], first: int) -> Dataset:
    """Return the questions as TRL reads them; `row` is the place among those of the scorer."""
    rows = []
    for row, question in enumerate(questions, first):
        rows.append({"prompt": list(map(dict, question.prompt)), "row": row})
    return Dataset.from_list(rows)


def _curve(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each step, with the reward on held-out questions where they were looked at; the first row is
    that of their look before the first step."""
    held_out_rewards = {logged["step"]: logged["eval_reward"] for logged in history if "eval_reward" in logged}
    curve: list[dict[str, Any]] = []
    if 0 in held_out_rewards:
        curve.append({"step": 0, HELD_OUT: held_out_rewards[0]})
    for logged in history:
        if "reward" in logged:
            row = {name: value for name, value in logged.items() if not isinstance(value, dict)}
            if row["step"] in held_out_rewards:
                row[HELD_OUT] = held_out_rewards[row["step"]]
            curve.append(row)
    return curve


class _Collapse(TrainerCallback):  # type: ignore[misc]
    """Ends training where the conductor has come to write one plan for every question."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save what there is, and stop."""
        if self._scorer.collapsed:
            control.should_save = control.should_training_stop = True


def grpo_settings(recipe: Recipe, out: Path, *, asked: int) -> dict[str, Any]:
    """Return the arguments of TRL's configuration; training is watched by `asked` held-out questions. Raises
    `ConfigInvalid` if a group does not fit its parts."""
    batch = recipe.questions * recipe.group
    if recipe.group < 2 or batch % recipe.micro:
        raise ConfigInvalid(
            [f"--group must be at least 2, and --micro must divide questions x group, which are {batch}"]
        )
    cuda = torch.cuda.is_available()
    chosen: dict[str, Any] = {
        "output_dir": str(out / "checkpoints"),
        "seed": recipe.seed,
        "max_steps": recipe.steps,
        "learning_rate": recipe.policy_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": min(10, recipe.steps // 10),
        "per_device_train_batch_size": recipe.micro,
        "gradient_accumulation_steps": batch // recipe.micro,
        "num_generations": recipe.group,
        "max_completion_length": recipe.completion,
        "shuffle_dataset": False,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "num_iterations": 1,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": recipe.every,
        "save_total_limit": 3,
        "report_to": [],
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": cuda,
        "chat_template_kwargs": dict(PLAIN),
        "disable_tqdm": True,
    }
    if asked:
        chosen |= {"eval_strategy": "steps", "eval_steps": recipe.every}
        chosen |= {"per_device_eval_batch_size": recipe.held_out_batch(asked)}
        chosen |= {"num_generations_eval": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
        chosen |= {"greater_is_better": True}
    if recipe.vllm != "none":
        chosen |= {"use_vllm": True, "vllm_mode": recipe.vllm, "vllm_importance_sampling_mode": "token_truncate"}
    if recipe.vllm == "server":
        chosen["vllm_server_base_url"] = recipe.vllm_url
    return chosen


def _identity(order: Order) -> dict[str, Any]:
    """Return the facts that identify an order: a folder is continued only by the same order."""
    return {
        "recipe": order.recipe.as_json(),
        "origin": dict(order.origin),
        "questions": _questions_digest(order.questions),
        "held_out_questions": _questions_digest(order.asked),
        "examples": training_record.digest([asdict(example) for example in order.examples]),
    }


def _questions_digest(questions: Sequence[Question]) -> str:
    return training_record.digest([[question.prompt, question.rule.written] for question in questions])


def _card(order: Order, folder: Path, scorer: Scorer | None) -> dict[str, Any]:
    """Return the run's card; `folder` has the weights."""
    base_sha256: dict[str, str] = {}
    if Path(order.recipe.model).is_dir():
        base_sha256 = training_record.files(Path(order.recipe.model))
    plans_carried_out: dict[str, int] = {}
    if scorer is not None:
        plans_carried_out = dict(scorer.carried)
    return {
        **_identity(order),
        "fresh_questions": _questions_digest(order.fresh),
        "backend": "trl" if order.questions else "imitation",
        "base": order.recipe.model,
        "base_sha256": base_sha256,
        "weights": folder.name,
        "weights_sha256": training_record.files(folder),
        "reward": reward.VERSION,
        "rollouts": SCHEMA,
        "imitated": _imitation_figures(order),
        "plans_carried_out": plans_carried_out,
        "pool": _workers(order.questions),
        "software": training_record.software(),
    }


def _imitation_figures(order: Order) -> dict[str, Any]:
    return {
        "examples": len(order.examples),
        "effective": round(effective_size([example.weight for example in order.examples]), 1),
        "held_out": len(order.held_out),
        "loss": training_record.column(order.out / "imitation.csv", "held_out"),
    }


def _workers(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Return everybody who stood in a prompt, with price and card."""
    everyone: dict[str, Worker] = {}
    for question in questions:
        for worker in question.workers:
            everyone[worker.name] = worker
    return [training_record.worker_entry(everyone[name]) for name in sorted(everyone)]
