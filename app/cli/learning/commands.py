"""Declares the commands that rate, measure, compare and train."""

import click

from app.cli.declarations import (
    AS_JSON,
    COUNT,
    DOLLARS,
    POOL,
    SINCE,
    TRUST_CODE,
    Finite,
    Group,
    argument,
    consent_options,
    filter_options,
    flag,
    in_order,
    option,
    repeatable,
)

POSITIVE = Finite(min=0, min_open=True)


def define(root: Group) -> None:
    """Define the commands."""
    _grade(root)
    _calibrate(root)
    _offpolicy(root)
    _replay(root)
    _eval(root)
    _rollouts(root)
    _train(root)


def _grade(root: Group) -> None:
    @root.add(
        "grade",
        "learning.grade",
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
    @filter_options("tier", "tenant")
    @flag("--dry-run", help="Store nothing.")
    @AS_JSON
    def grade() -> None:
        """Rate journaled runs by rules.

        With --signs it also notes what their callers did, apart from what callers said.
        """


def _calibrate(root: Group) -> None:
    @root.add(
        "calibrate",
        "learning.calibrate",
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
    @option("--usd", type=DOLLARS, help="Stop before more than this could be spent.")
    @option("--concurrency", type=COUNT, default=4, help="The tasks at one time.")
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
        "offpolicy",
        "learning.offpolicy",
        "baton offpolicy --tier baton-ultra --policy greedy",
        "baton offpolicy --since 30d",
    )
    @repeatable(
        "--policy",
        metavar="POLICY",
        help="greedy (the log's own, without exploring), current (the selector as it chooses now), uniform, or "
        "'always ARM' (default: those three and the arms that were taken most).",
    )
    @SINCE
    @filter_options("tier", "tenant")
    @AS_JSON
    def offpolicy() -> None:
        """Estimate what other policies would have earned.

        Needs rated runs whose plan was drawn at random. There is no verdict if too few runs support a policy.
        """


def _replay(root: Group) -> None:
    @root.add(
        "replay-dataset",
        "learning.replay_dataset",
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
        "learning.eval",
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
    @option("--limit", type=COUNT, help="The number of tasks, from the first one on (default: all).")
    @option("--out", default="evaluation", help="The folder for rows, table and plot; rows there are kept.")
    @repeatable("--with", "beside", metavar="DIR", help="A folder of rows to compare as well.")
    @flag("--report", help="Send no request, only report.")
    @option("--usd", type=DOLLARS, help="Send no further request once the rows have cost this much.")
    @option("--concurrency", type=COUNT, default=8, help="Requests at one time.")
    @option("--temperature", type=Finite(), help="The temperature of every request.")
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
    @root.add("rollouts", "learning.rollouts", "baton rollouts rollouts.jsonl --consent training --since 30d --rated")
    @argument("file", "The file of JSON lines to write; only its owner can read it.")
    @in_order(SINCE, AS_JSON)
    @consent_options()
    def rollouts() -> None:
        """Write journaled runs for training.

        Each has the conductor's prompt, the plan, and what it was worth.
        """


BUILTIN = "--backend builtin"
CHAT = "--backend trl and --backend awr: the model that is trained"
IMITATED = "Runs that are imitated"
REWARDED = "--backend trl: questions, and where plans are carried out"


def _train(root: Group) -> None:
    @root.add(
        "train",
        "learning.train",
        "baton train --seed 0 --out trained",
        "baton train --backend trl --model my-chat-model --tasks tasks.jsonl --out trained",
        "baton train --backend awr --model my-chat-model --warm-start journal --consent training",
    )
    @option(
        "--backend",
        type=click.Choice(["builtin", "trl", "awr"]),
        default="builtin",
        help="A small transformer on torch; policy gradients over a chat model by TRL; or advantage-weighted "
        "regression of a chat model on journaled runs.",
    )
    @option("--out", default="trained", help="The folder for checkpoint, curve, card and report.")
    @option("--seed", type=int, default=0, help="The seed of weights, tasks, pools and rollouts.")
    @option("--steps", type=COUNT, help="Steps of policy gradients (default: the recipe's).")
    @option("--threads", type=COUNT, default=1, help="Threads of torch.")
    @flag("--dear", help="Weigh cost by 0.60 and wait by 0.35, not 0.30 and 0.10.")
    @BUILTIN_OPTIONS
    @CHAT_MODEL_OPTIONS
    @IMITATED_OPTIONS
    @REWARDED_OPTIONS
    @TRUST_CODE
    def train() -> None:
        """Train a conductor, or continue an interrupted training. Needs torch.

        The backend `builtin` trains a small one from scratch in the rehearsal world, and compares it with baselines on
        tasks that it has not seen. The others train any chat model.
        """


BUILTIN_OPTIONS = in_order(
    option(
        "--recipe",
        type=click.Choice(["roles", "words", "words-large"]),
        default="roles",
        section=BUILTIN,
        help="How plans are written, and what is trained: subtasks by role; in words; in words, at a size for a GPU.",
    ),
    option(
        "--drill-steps", type=COUNT, section=BUILTIN, help="Steps of learning to read cards (default: the recipe's)."
    ),
    option("--warm-steps", type=COUNT, section=BUILTIN, help="Steps of imitating the best of drawn plans."),
    option("--lessons", type=COUNT, default=1_000, section=BUILTIN, help="Held-out tasks of each comparison."),
    option(
        "--gap",
        type=Finite(),
        section=BUILTIN,
        help="Exit with 1 unless this share of the gap is closed on held-out tasks.",
    ),
    option(
        "--rounds",
        type=click.Choice([1, 2]),
        default=1,
        section=BUILTIN,
        help="2 trains a second round, from --from.",
    ),
    option("--from", "checkpoint", metavar="FOLDER", section=BUILTIN, help="A training run, or its export."),
)

CHAT_MODEL_OPTIONS = in_order(
    option("--model", section=CHAT, help="A chat model: a folder, or a name that Hugging Face knows."),
    option(
        "--lora",
        type=click.IntRange(min=0),
        default=32,
        metavar="RANK",
        section=CHAT,
        help="The rank of the adapters; 0 trains all weights.",
    ),
    option("--questions", type=COUNT, default=16, section=CHAT, help="Questions of each step."),
    option("--group", type=COUNT, default=16, section=CHAT, help="Plans for each question."),
    option("--micro", type=COUNT, default=4, section=CHAT, help="Plans that pass through the model at a time."),
    option(
        "--rate",
        type=POSITIVE,
        section=CHAT,
        help="The learning rate (default: 1e-5 for adapters, 1e-6 for all weights).",
    ),
    option("--completion", type=COUNT, default=1_024, section=CHAT, help="The most tokens of a plan."),
    option(
        "--every",
        type=COUNT,
        default=20,
        section=CHAT,
        help="Steps between checkpoints, and between looks at held-out questions.",
    ),
    option(
        "--vllm",
        type=click.Choice(["none", "colocate", "server"]),
        default="none",
        section=CHAT,
        help="The engine that writes the plans.",
    ),
    option(
        "--vllm-url",
        default="",
        show_default=False,
        section=CHAT,
        help="The address of a server started by `trl vllm-serve`.",
    ),
)

IMITATED_OPTIONS = in_order(
    option(
        "--warm-start",
        metavar="FILE",
        section=IMITATED,
        help="Rollouts to imitate, first or alone; `journal` reads the database.",
    ),
    option("--epochs", type=COUNT, default=2, section=IMITATED, help="Epochs of imitation."),
    option("--batch", type=COUNT, default=8, section=IMITATED, help="Plans of each step of imitation."),
    option(
        "--imitation-rate",
        type=POSITIVE,
        section=IMITATED,
        help="The learning rate of imitation (default: 1e-4, 1e-5 for all weights).",
    ),
    option(
        "--beta",
        type=POSITIVE,
        default=0.3,
        section=IMITATED,
        help="With awr and builtin: the advantage at which a run counts e times as much.",
    ),
    consent_options(IMITATED),
)

REWARDED_OPTIONS = in_order(
    option(
        "--tasks",
        metavar="FILE",
        section=REWARDED,
        help="A task set, as for `baton grade` (default: the rehearsal world).",
    ),
    option("--rollouts", metavar="FILE", section=REWARDED, help="Take the conversations from journaled runs."),
    option(
        "--held-out-questions",
        type=click.IntRange(min=0),
        default=128,
        section=REWARDED,
        help="Questions that choose which weights are kept, at most a tenth of all; as many others judge these.",
    ),
    option(
        "--patience",
        type=COUNT,
        default=3,
        section=REWARDED,
        help="Looks at them without a better reward, after which training ends.",
    ),
    option(
        "--cache",
        metavar="FILE",
        section=REWARDED,
        help="A file of plans that were carried out, which are not carried out again for the same question.",
    ),
    flag("--random-pools", section=REWARDED, help="Show each question only some of the workers."),
    option(
        "--url",
        section=REWARDED,
        help="The address of a Baton, with its key in BATON_API_KEY (default: one of its own).",
    ),
    option("--concurrency", type=COUNT, default=16, section=REWARDED, help="Plans carried out at a time."),
    option(
        "--full-usd",
        type=POSITIVE,
        default=0.006,
        section=REWARDED,
        help="Dollars from which on cost counts in full.",
    ),
    option(
        "--full-seconds",
        type=POSITIVE,
        default=12.0,
        section=REWARDED,
        help="Seconds from which on a wait counts in full.",
    ),
)
