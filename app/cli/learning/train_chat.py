"""`baton train --backend trl|awr`: the training data of a chat model, and the service that carries out its plans.

Questions come from a task set, from journaled runs, or from the rehearsal world. Plans go to the service at `--url`, or
to one that is started for the training over the same pool. The trainer is an argument, so this module needs no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.embedded import process
from app.cli.learning import task_set
from app.cli.learning.rollouts import collect, rollout_filter
from app.cli.learning.sandbox import Sandbox
from app.core.pool.catalog import Catalog, Tier
from app.core.rating.calibration import add_measurements
from app.errors import ConfigInvalid
from app.lab import chat_export, training_questions, world_file
from app.lab.plan_execution import Place
from app.lab.rollouts import Example, Rollout, advantage_weighted, from_lines, right_examples
from app.lab.training_options import Recipe
from app.lab.world import VERSION, Weights, profiles
from app.process.config import Configuration, configure, read
from app.store.sqlkit import revisions

WORLD_TASKS = 4_000
JOURNAL = "journal"
KEY = "BATON_API_KEY"
Say = Callable[[str], None]
Questions = list[training_questions.Question]


def run(args: Arguments, environ: Mapping[str, str], trainer: Any, say: Say) -> None:
    """Train. `trainer` has `Order` and `train`. Raises `ConfigInvalid` if an option is missing."""
    terminal.log_to_stderr("warning")
    if args.model is None:
        raise ConfigInvalid(["--model: name a chat model, as a folder or as Hugging Face knows it"])
    recipe, out = _recipe(args), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rollouts = imitation_rollouts(args, environ)
    common = {"out": out, "recipe": recipe, "threads": args.threads}
    if args.backend == "awr":
        common |= _examples(rollouts, args, recipe, say)
        origin = {"imitated": args.warm_start}
        trainer.train(trainer.Order(**common, shown=chat_export.of_rollouts(rollouts), origin=origin), say)
        return
    config, pool = _pool(args, environ, out)
    name = "baton-ultra"
    if pool:
        name = world_file.TIER
    tier = _tier(config, args.tier or name)
    questions, asked, fresh = _questions(args, config, tier, recipe)
    judging = {training_questions.first_question(question.rule.conversation) for question in (*asked, *fresh)}
    others = [rollout for rollout in rollouts if training_questions.first_question(rollout.conversation) not in judging]
    common |= _examples(others, args, recipe, say)
    origin = {
        "imitated": args.warm_start,
        "questions": args.tasks or VERSION,
        "journaled": args.rollouts,
        "pool": config.catalog.digest,
        "tier": tier.name,
        "random_pools": args.random_pools,
    }
    with _place(args, environ, tier, pool) as place:
        shown = chat_export.of_questions(questions)
        cache = None
        if args.cache is not None:
            cache = Path(args.cache)
        more = {
            "shown": shown,
            "questions": questions,
            "asked": asked,
            "fresh": fresh,
            "place": place,
            "cache": cache,
            "origin": origin,
        }
        trainer.train(trainer.Order(**common, **more), say)


def _recipe(args: Arguments) -> Recipe:
    same = ("model", "seed", "lora", "questions", "group", "micro", "rate", "completion", "vllm", "vllm_url", "epochs")
    options = {name: getattr(args, name) for name in (*same, "batch", "imitation_rate", "beta", "every", "patience")}
    options["held_out"] = args.held_out_questions
    if args.vllm == "server" and not args.vllm_url:
        raise ConfigInvalid(["--vllm server: say where TRL's vLLM server is with --vllm-url"])
    cost, wait = 0.30, 0.10
    if args.dear:
        cost, wait = 0.60, 0.35
    weights = Weights(cost, wait, args.full_usd, args.full_seconds)
    return Recipe(**options, steps=args.steps or Recipe(args.model).steps, weights=weights)


# -- imitation


def imitation_rollouts(args: Arguments, environ: Mapping[str, str]) -> list[Rollout]:
    """Return the rollouts that `--warm-start` names, or none without it."""
    if args.warm_start is not None:
        return _rollouts(args, environ)
    if args.backend == "awr":
        raise ConfigInvalid(["--backend awr: name the rollouts with --warm-start FILE, or --warm-start journal"])
    return []


def _examples(rollouts: Sequence[Rollout], args: Arguments, recipe: Recipe, say: Say) -> dict[str, Sequence[Example]]:
    """Return the examples to train with, and those that are held out, by the names of the order's fields."""
    if args.warm_start is None:
        return {}
    sides = []
    for side in ("train", "held-out"):
        some = [rollout for rollout in rollouts if rollout.split == side]
        if args.backend == "awr":
            sides.append(advantage_weighted(some, recipe.weights, recipe.beta, recipe.cap))
        else:
            sides.append(right_examples(some))
    say(f"{len(rollouts)} rollouts; {len(sides[0])} plans to imitate, {len(sides[1])} held out")
    if not sides[0]:
        raise ConfigInvalid(["there is nothing to imitate: no rollout of the training side is rated as it must be"])
    return {"examples": sides[0], "held_out": sides[1]}


def _rollouts(args: Arguments, environ: Mapping[str, str]) -> list[Rollout]:
    if args.warm_start == JOURNAL:
        return event_loop.run(collect(read(environ), rollout_filter(args), since=None))[0]
    return _read(args.warm_start, "--warm-start")


def _read(path: str, option: str) -> list[Rollout]:
    try:
        return list(from_lines(Path(path).read_text(encoding="utf-8").split("\n")))
    except (OSError, ValueError) as error:
        raise ConfigInvalid([f"{option} {path}: {error}; `baton rollouts` writes such a file"]) from None


# -- questions and pool


def _pool(args: Arguments, environ: Mapping[str, str], out: Path) -> tuple[Configuration, str]:
    """Return the configuration in force, or for the rehearsal world its own one with the text of its pool file."""
    if args.tasks is not None:
        config = configure(environ)
        return replace(config, catalog=event_loop.run(_calibrate_catalog(config))), ""
    text = world_file.pool_file(tuple(profiles().values()))
    (out / "pool.toml").write_text(text)
    others = process.without_settings(environ)
    return configure({**others, "BATON_POOL": str(out / "pool.toml"), "BATON_DATA_DIR": str(out)}), text


async def _calibrate_catalog(config: Configuration) -> Catalog:
    """Return the pool with the results of `baton calibrate` on its cards, as the service shows it to its conductor."""
    if not revisions.exists(config.settings.database_url):
        return config.catalog
    async with storage.open_configured_store(config.settings) as store:
        return add_measurements(config.catalog, await store.trials())


def _tier(config: Configuration, name: str) -> Tier:
    tier = config.catalog.tier(name)
    if tier is None:
        raise ConfigInvalid([f"--tier: there is no such tier; there are {', '.join(config.catalog.tiers)}"])
    return tier


def _questions(
    args: Arguments, config: Configuration, tier: Tier, recipe: Recipe
) -> tuple[Questions, Questions, Questions]:
    """Return a question for each group of each step, those by which weights are chosen, and fresh ones."""
    seed = recipe.seed
    rules = _rules(args, seed)
    if args.tasks is None:
        fresh = training_questions.draw_fresh_rules(recipe.held_out, WORLD_TASKS, seed)
    else:
        rules, fresh = training_questions.split_held_out(rules, recipe.held_out, seed + 1)
    rules, asked = training_questions.split_held_out(rules, recipe.held_out, seed)
    pool = [config.catalog.workers[name] for name in tier.pool]
    limits = tier.efforts[tier.effort]

    def ask(rules: Sequence[training_questions.Rule], count: int, seed: int) -> Questions:
        drawn = training_questions.draw_questions(
            rules,
            pool,
            limits,
            count,
            seed,
            random_pools=args.random_pools,
            message_chars=tier.conductor.message_chars,
        )
        return list(drawn)

    count = recipe.steps * recipe.questions
    return ask(rules, count, seed), ask(asked, len(asked), seed + 1), ask(fresh, len(fresh), seed + 2)


def _rules(args: Arguments, seed: int) -> list[training_questions.Rule]:
    if args.tasks is None:
        if args.rollouts is not None:
            raise ConfigInvalid(["--rollouts: name a task set that rates their answers with --tasks"])
        return training_questions.draw_rules(WORLD_TASKS, seed)
    sandbox = Sandbox(args.trust_code)
    tasks = task_set.require_valid(lambda faults: task_set.read(Path(args.tasks), sandbox.run, faults))
    sandbox.require_isolation(task.grader for task in tasks)
    rules = [training_questions.Rule(task.messages, task.grader, task.grader_text) for task in tasks]
    if args.rollouts is None:
        return rules
    rollout_rules = training_questions.of_rollouts(_read(args.rollouts, "--rollouts"), rules)
    if not rollout_rules:
        raise ConfigInvalid([f"--rollouts {args.rollouts}: no run of the training side asks what {args.tasks} rates"])
    return rollout_rules


# -- the service that carries out plans


@contextmanager
def _place(args: Arguments, environ: Mapping[str, str], tier: Tier, pool: str) -> Iterator[Place]:
    limits = asdict(tier.efforts[tier.effort])
    options = {"tier": tier.name, "concurrency": args.concurrency, "deadline": float(limits["seconds"]) + 10.0}
    if args.url is not None:
        if not environ.get(KEY):
            raise ConfigInvalid([f"--url: put a key of that Baton into {KEY}"])
        yield Place(args.url.rstrip("/").removesuffix("/v1"), environ[KEY], **options)
        return
    with process.service_process(pool, environ, runs=args.concurrency) as (url, key):
        yield Place(url, key, **options)
