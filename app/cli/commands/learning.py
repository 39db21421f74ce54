"""Commands that rate, measure and compare: calibrate, grade, eval, offpolicy, replay-dataset and rollouts."""

import click

from app.cli.commands.declarations import (
    AS_JSON,
    COUNT,
    DOLLARS,
    POOL,
    SINCE,
    TRUST_CODE,
    Group,
    agreed,
    argument,
    flag,
    in_order,
    only,
    option,
    repeatable,
)


def define(root: Group) -> None:
    """Define the commands."""
    _grade(root)
    _calibrate(root)
    _offpolicy(root)
    _replay(root)
    _eval(root)
    _rollouts(root)


def _grade(root: Group) -> None:
    @root.add(
        "grade",
        "grade",
        "baton grade --tasks tasks.jsonl --since 7d",
        """baton grade --grader '{"kind": "numeric", "expected": 42}' --run last""",
        "baton grade --signs --dry-run",
    )
    @option("--tasks", metavar="FILE", help='JSON lines: {"question": "...", "grader": {"kind": ...}}')
    @repeatable(
        "--grader",
        metavar="JSON",
        help='A rule for every run, such as {"kind": "numeric", "expected": 42}; kinds: exact, numeric, choice, regex, '
        "schema, tests.",
    )
    @TRUST_CODE
    @flag("--signs", help="Note which callers cancelled, left, or asked again.")
    @option("--run", help="Only this run: its id, a prefix of one, or last.")
    @SINCE
    @only("tier", "tenant")
    @flag("--dry-run", help="Store nothing.")
    @AS_JSON
    def grade() -> None:
        """Rate journaled runs by rules.

        With --signs it also notes what their callers did, apart from what callers said.
        """


def _calibrate(root: Group) -> None:
    @root.add(
        "calibrate",
        "calibrate",
        "baton calibrate --usd 2 --yes",
        "baton calibrate --tasks tasks.jsonl",
        "baton calibrate --show",
    )
    @option(
        "--tasks",
        metavar="FILE",
        help='JSON lines: {"question": "...", "grader": {"kind": ...}, "family": "..."} (default: the built-in tasks).',
    )
    @repeatable("--worker", metavar="WORKER", help="Only this worker (default: all).")
    @option(
        "--each",
        type=click.Choice([1, 2, 3]),
        default=2,
        help="Tasks of each of 12 families at each of 3 levels.",
    )
    @option("--tokens", type=COUNT, default=2_048, help="The most output tokens of one answer.")
    @option("--usd", type=DOLLARS, help="Stop before more than so many dollars could be spent.")
    @option("--concurrency", type=COUNT, default=4, help="Tasks that are worked on at one time.")
    @flag("--again", help="Also give tasks that were given before (default: only the rest).")
    @flag("--yes", help="Do not ask before money is spent.")
    @flag("--show", help="Only show what is known; ask nobody.")
    @TRUST_CODE
    @in_order(POOL, AS_JSON)
    def calibrate() -> None:
        """Measure every worker by the same tasks.

        Each worker gets each task once. The pass rates get onto the cards that conductors are shown, and a learning
        policy begins with them. The cost is printed first.
        """


def _offpolicy(root: Group) -> None:
    @root.add(
        "offpolicy", "offpolicy", "baton offpolicy --tier baton-ultra --policy greedy", "baton offpolicy --since 30d"
    )
    @repeatable(
        "--policy",
        metavar="POLICY",
        help="greedy (the log's own, without exploring), current (the selector as it chooses now), uniform, or "
        "'always ARM' (default: those three and the arms that were taken most).",
    )
    @SINCE
    @only("tier", "tenant")
    @AS_JSON
    def offpolicy() -> None:
        """Estimate what other policies would have earned.

        Needs rated runs whose plan was drawn at random. There is no verdict if too few runs support a policy.
        """


def _replay(root: Group) -> None:
    @root.add(
        "replay-dataset",
        "replay_dataset",
        "baton replay-dataset RouteLLM/routellm/evals/mmlu/responses",
        "baton replay-dataset RouterArena/cached_results --seeds 3 --json",
        "baton replay-dataset litellm.jsonl --scores scores.jsonl --cost-weight 0.1",
    )
    @argument("files", "Files of recorded outcomes (.csv, .jsonl), or folders of them.", nargs=-1, required=True)
    @option("--scores", metavar="FILE", help='Scores for the lines of a log: JSON lines {"id": ..., "score": 0 to 1}.')
    @repeatable("--cost", metavar="MODEL=DOLLARS", help="The dollars of a usual call, in place of recorded costs.")
    @option("--seeds", type=COUNT, default=10, help="The number of seeds; each splits the prompts anew.")
    @option("--ratings", type=COUNT, default=2_000, help="The most prompts to learn from.")
    @option("--held-out", type=COUNT, default=1_000, help="The most prompts to be judged by; at most half of all.")
    @option(
        "--cost-weight",
        type=float,
        default=0.2,
        help="The share of a right answer's worth that the best model's cost takes away.",
    )
    @AS_JSON
    def replay() -> None:
        """Replay recorded outcomes of models for selector and baselines.

        Reads RouteLLM's and RouterArena's recorded results, a form of its own, and logs of LiteLLM and OpenRouter. With
        an outcome of every model for each prompt it computes APGR, AUC, cost at 95 % of the best model's score, and
        regret; from a log it estimates rewards.
        """


def _eval(root: Group) -> None:
    @root.add(
        "eval",
        "eval",
        "baton eval --limit 20 --out evaluation",
        "baton eval --url http://127.0.0.1:8080 --arms tier,single:my-worker,sc:5 --usd 5",
        "baton eval --report --out evaluation",
    )
    @option("--url", help="A running service with [evaluation] arms = true in its pool file.")
    @option("--key", help="Its key, with runs:write and runs:read (default: BATON_API_KEY).")
    @option("--tasks", metavar="FILE", help="JSON lines as for `baton grade` (default: built-in tasks).")
    @option("--tier", default="baton-ultra", help="The tier whose arms are compared, over its pool and limits.")
    @option(
        "--arms",
        help="tier, single:WORKER, sc:5, moa:3, static:pev, conductor:WORKER, random; separated by commas.",
    )
    @option("--against", metavar="ARM", help="The reference (default: the tier as it is, else the first).")
    @option("--repeats", type=COUNT, default=3, help="Repetitions of each task for each arm; averaged within the task.")
    @option("--limit", type=COUNT, help="Only the first so many tasks.")
    @option("--out", default="evaluation", help="The folder for rows, table and plot; rows there are kept.")
    @repeatable("--with", "beside", metavar="DIR", help="A folder of rows to compare as well.")
    @flag("--report", help="Send no request, only report.")
    @option("--usd", type=DOLLARS, help="Begin nothing more once the rows have cost so many dollars.")
    @option("--concurrency", type=COUNT, default=8, help="Requests at one time.")
    @option("--temperature", type=float, help="The temperature of every request.")
    @option("--effort", help="The effort of every request: minimal, low, medium, high, ...")
    @flag("--no-explore", help="A selector makes its best choice with certainty.")
    @option("--seed", type=int, default=0, help="The seed of the resampling.")
    @option("--resamples", type=COUNT, default=10_000, help="Resamples of the tasks.")
    @in_order(POOL, AS_JSON)
    @TRUST_CODE
    def evaluate() -> None:
        """Compare arms of a tier by accuracy, cost and latency.

        Every arm gets the same tasks; figures have intervals. Without --url it runs in its own service, over the
        configured pool.
        """


def _rollouts(root: Group) -> None:
    @root.add("rollouts", "rollouts", "baton rollouts rollouts.jsonl --consent training --since 30d --rated")
    @argument("file", "The file of JSON lines to write; only its owner can read it.")
    @in_order(SINCE, AS_JSON)
    @agreed()
    def rollouts() -> None:
        """Write journaled runs for training.

        Each has the conductor's prompt, the plan, and what it was worth.
        """
