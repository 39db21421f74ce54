"""Declares `baton train` with its options."""

import click

from app.cli.commands.declarations import COUNT, TRUST_CODE, Group, agreed, flag, in_order, option

BUILTIN = "--backend builtin"
CHAT = "--backend trl and --backend awr: the model that is trained"
IMITATED = "Runs that are imitated"
REWARDED = "--backend trl: questions, and where plans are carried out"


def define(root: Group) -> None:
    """Define the command."""

    @root.add(
        "train",
        "train",
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

        A small one is trained from scratch in the rehearsal world and compared with baselines on tasks that it has
        not seen; or any chat model is trained.
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
        type=float,
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
        type=int,
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
        type=float,
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
        type=float,
        section=IMITATED,
        help="The learning rate of imitation (default: 1e-4, 1e-5 for all weights).",
    ),
    option(
        "--beta",
        type=float,
        default=0.3,
        section=IMITATED,
        help="With awr and builtin: the advantage at which a run counts e times as much.",
    ),
    agreed(IMITATED),
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
        type=int,
        default=128,
        section=REWARDED,
        help="Questions that are only looked at, at most a tenth of all; the weights that are best there are kept.",
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
        type=float,
        default=0.006,
        section=REWARDED,
        help="Dollars from which on cost counts in full.",
    ),
    option(
        "--full-seconds",
        type=float,
        default=12.0,
        section=REWARDED,
        help="Seconds from which on a wait counts in full.",
    ),
)
