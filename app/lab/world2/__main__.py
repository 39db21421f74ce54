"""`python -m app.lab.world2` compares all policies of world 2 and writes one table in Markdown."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from app.errors import ConfigInvalid
from app.lab.world2 import ceiling, selector_log
from app.lab.world2.baselines import Policy, Setting
from app.lab.world2.bounds import OptimumAsRead, OptimumByCards, optima_of_partial_knowledge
from app.lab.world2.evolution import EvolvedPrompt, name_evolved_prompt
from app.lab.world2.learning import BUDGETS, READ_TASKS, learn_policies, name_learned_policy, thrifty_name
from app.lab.world2.model_free import policy_names as model_free_names
from app.lab.world2.model_free import train_model_free
from app.lab.world2.provider import SPLITS, pool_file, task_set
from app.lab.world2.rehearsal import TESTED
from app.lab.world2.rehearsal import report as rehearsal_report
from app.lab.world2.shipped import write
from app.lab.world2.standings import (
    PolicyGroup,
    SeedResults,
    Sizes,
    baseline_group,
    load_results,
    report,
    run_seed,
    save_results,
    selector_group,
)


def main() -> int:
    """Compare all policies over several seeds, or print what a service needs to pose tasks of this world."""
    parser = argparse.ArgumentParser(prog="python -m app.lab.world2", description=main.__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds (10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--pools", type=int, default=Sizes().pools, help="pools of each split")
    parser.add_argument("--tested", type=int, default=Sizes().tested, help="test tasks of each split")
    parser.add_argument("--out", type=Path, help="the file, written after each seed; else standard output")
    parser.add_argument("--training", type=int, default=Sizes().training, help="training tasks of each seed")
    parser.add_argument("--learn", type=int, default=0, help="most verdicts that a learned policy gets (0: none)")
    parser.add_argument("--keep", type=Path, help="the folder of seeds that are done, which are not run again")
    parser.add_argument("--pool-file", type=int, help="print the pool file of this number, and nothing else")
    parser.add_argument("--unseen", action="store_true", help="with workers that training never meets")
    parser.add_argument("--tasks", choices=SPLITS, help="print the task set of a split, and nothing else")
    parser.add_argument("--conductor", type=Path, help="learn the policy of the rehearsal conductor into this file")
    parser.add_argument(
        "--rehearsal", action="store_true", help="compare the rehearsal conductor with tuned fixed plans"
    )
    parser.add_argument("--ceiling", type=int, metavar="POOLS", help="print what cards of unseen workers allow at most")
    parser.add_argument("--selector", type=Path, help="simulate the product's selector, and write its regret to a file")
    options = parser.parse_args()
    if min(options.seeds, options.pools, options.tested, options.training - 1) < 1:
        parser.error("--seeds, --pools and --tested are numbers from 1, and --training is one from 2")
    if options.ceiling is not None:
        print(ceiling.report(options.ceiling))
        return 0
    if options.selector is not None:
        selector_log.write(options.selector)
        return 0
    if options.rehearsal:
        print(rehearsal_report(TESTED))
        return 0
    if options.conductor is not None:
        write(options.conductor)
        return 0
    if options.pool_file is not None:
        print(pool_file(options.pool_file, unseen=options.unseen))
        return 0
    if options.tasks is not None:
        print("\n".join(task_set(options.tasks)))
        return 0
    try:
        return _compare(options)
    except ConfigInvalid as error:
        parser.error(f"--keep: {error}")


def _compare(options: argparse.Namespace) -> int:
    """Run the seeds one after the other and write the report, first without what takes longest, then with all.

    What a kept seed has already is not run again.
    """
    sizes = Sizes(options.pools, options.training, options.training // 2, options.tested)
    quick, slow = (
        [baseline_group(), *_learner(options.learn)],
        [*_bounds(options.learn), selector_group(sizes), *_free(options.learn), *_evolve_prompts(options.learn)],
    )
    results: dict[int, SeedResults] = {}
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    for groups in (quick, [*quick, *slow]):
        for seed in range(options.first, options.first + options.seeds):
            path = options.keep / f"seed-{seed}.npz" if options.keep else None
            if seed not in results and path is not None and path.exists():
                results[seed] = load_results(seed, path, sizes)
            results[seed] = run_seed(seed, sizes, groups, results.get(seed))
            if path is not None:
                save_results(results[seed], path, sizes)
            print(f"seed {seed} has {len(groups)} groups of policies", file=sys.stderr, flush=True)
            if options.out:
                options.out.write_text(report(list(results.values()), sizes))
    if not options.out:
        print(report(list(results.values()), sizes))
    return 0


def _learner(most: int) -> list[PolicyGroup]:
    """Return what learns from up to so many verdicts with a model of workflows."""
    if most < BUDGETS[0]:
        return []
    budgets = [budget for budget in BUDGETS if budget <= most]
    names = (*map(name_learned_policy, budgets), thrifty_name(budgets[-1]))
    return [PolicyGroup(names, lambda settings, seed: learn_policies(settings, seed, most))]


def _free(most: int) -> list[PolicyGroup]:
    """Return what learns from up to so many verdicts without one."""
    if most < BUDGETS[0]:
        return []
    return [PolicyGroup(tuple(model_free_names(most)), lambda settings, seed: train_model_free(settings, seed, most))]


def _evolve_prompts(most: int) -> list[PolicyGroup]:
    """Return prompts that are evolved with up to so many verdicts."""
    budgets = [budget for budget in BUDGETS if budget <= most]

    def make(settings: Sequence[Setting], seed: int) -> Sequence[Policy]:
        return [EvolvedPrompt(settings, seed, budget) for budget in budgets]

    if not budgets:
        return []
    return [PolicyGroup(tuple([name_evolved_prompt(budget) for budget in budgets]), make)]


def _bounds(most: int) -> list[PolicyGroup]:
    """Return the bounds of what can be known, where anything learns."""

    def make(settings: Sequence[Setting], seed: int) -> Sequence[Policy]:
        return [OptimumByCards(), OptimumAsRead(seed, READ_TASKS), *optima_of_partial_knowledge()]

    if most < BUDGETS[0]:
        return []
    names = (OptimumByCards.name, OptimumAsRead.name, *[policy.name for policy in optima_of_partial_knowledge()])
    return [PolicyGroup(names, make)]


if __name__ == "__main__":
    raise SystemExit(main())
