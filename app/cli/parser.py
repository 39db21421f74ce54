"""The command line of `baton`: every command with its options, and the module of this package that runs it."""

import argparse
from importlib.metadata import version

DESCRIPTION = "Baton: one OpenAI-compatible endpoint in front of a conducted pool of models."
EPILOG = "Settings are environment variables: `baton config` lists them all. `baton COMMAND --help` says more."


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows defaults and keeps the lines of descriptions."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. Parsed arguments have the module's name in `module`."""
    root = argparse.ArgumentParser(prog="baton", description=DESCRIPTION, epilog=EPILOG)
    root.add_argument("--version", action="version", version=f"baton {version('baton')}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _processes(commands)
    _operations(commands)
    _keys(commands)
    _runs(commands)
    _audit(commands)
    _plan(commands)
    _grade(commands)
    _calibrate(commands)
    _offpolicy(commands)
    _eval(commands)
    _train(commands)
    _conductor(commands)
    _rollouts(commands)
    return root


Commands = argparse._SubParsersAction  # argparse has no public name for it


def _command(
    commands: "Commands[argparse.ArgumentParser]", name: str, module: str, words: str
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", formatter_class=Help)
    made.set_defaults(module=module, verb=name)
    return made


def _processes(commands: "Commands[argparse.ArgumentParser]") -> None:
    _command(commands, "serve", "process", "run the whole service in this process")
    _command(commands, "gateway", "process", "answer HTTP requests; dispatchers execute the runs (Postgres and Redis)")
    _command(commands, "dispatcher", "process", "plan and execute runs; start as many as you need (Postgres and Redis)")


def _operations(commands: "Commands[argparse.ArgumentParser]") -> None:
    _command(commands, "migrate", "schema", "bring the database to this version's schema")
    _command(commands, "config", "settings", "list all settings with value, default, origin and meaning")
    _command(
        commands,
        "doctor",
        "doctor",
        "check settings, database, Redis, conductors and provider keys; asks each real model for one token, "
        "which costs a fraction of a cent",
    )
    _command(commands, "probe", "probe", "exit 0 if the gateway on this machine is ready; for container health checks")


def _keys(commands: "Commands[argparse.ArgumentParser]") -> None:
    verbs = _command(commands, "keys", "keys", "add, list and revoke API keys").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    add = _command(verbs, "add", "keys", "make a key; its secret is shown once")
    add.add_argument("name", help="what the key is for")
    add.add_argument("--tenant", default="default", help="whose runs it may see")
    add.add_argument("--all-tenants", action="store_true", help="have its scopes reach the runs of every tenant")
    add.add_argument(
        "--scope",
        action="append",
        metavar="SCOPE",
        dest="scopes",
        help="runs:write, runs:read, audit:read or admin; repeatable (default: runs:write and runs:read)",
    )
    add.add_argument("--tier", action="append", metavar="TIER", dest="tiers", help="repeatable (default: every tier)")
    add.add_argument(
        "--label", action="append", metavar="LABEL", dest="labels", help="put on each of its tasks; repeatable"
    )
    add.add_argument("--usd", type=_dollars, help="most that one run may cost, in dollars")
    add.add_argument("--rpm", type=_count, help="requests a minute")
    add.add_argument("--tpm", type=_count, help="tokens a minute, over all calls of its runs")
    add.add_argument("--concurrency", type=_count, help="requests at one time")
    add.add_argument("--expires", type=_seconds, metavar="SPAN", help="lifetime, such as 12h, 30d or 52w")
    _command(verbs, "ls", "keys", "list the keys, never their secrets")
    revoke = _command(verbs, "revoke", "keys", "end a key; gateways follow within five seconds")
    revoke.add_argument("id", help="the public id, between bt_ and the next underscore")


def _runs(commands: "Commands[argparse.ArgumentParser]") -> None:
    verbs = _command(
        commands, "runs", "runs", "read the journal of the configured database, or stop a run"
    ).add_subparsers(title="verbs", metavar="VERB", required=True)
    ls = _command(verbs, "ls", "runs", "list runs, newest first")
    ls.add_argument("--limit", type=_count, default=20, help="most runs to list")
    for name in ("state", "tier", "worker", "label", "key", "tenant"):
        ls.add_argument(f"--{name}", help=f"only runs of this {name}")
    ls.add_argument("--degraded", action="store_true", help="only runs that a fallback decided")
    ls.add_argument("--since", type=_seconds, metavar="SPAN", help="only runs of the last 30m, 12h, 7d, ...")
    show = _command(
        verbs, "show", "runs", "explain one run: why it was routed so, and what each worker saw and answered"
    )
    show.add_argument("--full", action="store_true", help="whole texts instead of excerpts")
    watch = _command(verbs, "watch", "runs", "follow a run's journal until the run has ended")
    for verb in (show, watch):
        verb.add_argument("run", nargs="?", default="last", help="a run's id, a prefix of one, or last")
    cancel = _command(verbs, "cancel", "runs", "ask a run to end, whichever process has it, and wait for its end")
    cancel.add_argument("run", help="a run's id, or a prefix of one")
    for verb in (ls, show):
        verb.add_argument("--json", action="store_true", help="as JSON")


def _audit(commands: "Commands[argparse.ArgumentParser]") -> None:
    verbs = _command(commands, "audit", "audit", "check the journal against what Baton promises").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    check = _command(
        verbs,
        "check",
        "audit",
        "report every contradiction that the journal shows; exit 0 if there is none, 1 if there are some, "
        "2 if it could not be read",
    )
    check.add_argument("file", nargs="?", help="an export; without one, the configured database is read")
    check.add_argument("--json", action="store_true", help="as JSON")
    export = _command(verbs, "export", "audit", "write the journal, with callers' texts, to a file of JSON lines")
    export.add_argument("file", help="where to; only its owner can read it")
    for verb in (check, export):
        verb.add_argument("--run", help="only the run of this id")
        verb.add_argument("--since", type=_seconds, metavar="SPAN", help="only runs of the last 30m, 12h, 7d, ...")
    _command(verbs, "rules", "audit", "list the rules by name, with the promise that each stands for")


def _plan(commands: "Commands[argparse.ArgumentParser]") -> None:
    plan = _command(
        commands,
        "plan",
        "preview",
        "show how a question would be routed; only the plan is made (and journaled), nothing is executed",
    )
    plan.add_argument("question", help="what to ask")
    plan.add_argument("--tier", default="baton-ultra", help="the tier, or an alias of one")
    plan.add_argument("--effort", help="minimal, low, medium, high, ... (default: the tier's own)")
    for name, words in (
        ("label", "a label of the task; workers that are not cleared for it are left out"),
        ("allow", "a worker that may be used"),
        ("deny", "a worker that may not be used"),
    ):
        plan.add_argument(f"--{name}", action="append", default=[], metavar=name.upper(), help=f"{words}; repeatable")
    plan.add_argument("--pin", metavar="WORKER", help="the one worker to use")


def _train(commands: "Commands[argparse.ArgumentParser]") -> None:
    train = _command(
        commands,
        "train",
        "train",
        "train a conductor, or continue an interrupted training: a small one from scratch in the rehearsal world, "
        "compared with baselines on tasks that it has not seen; or any chat model; needs torch",
    )
    train.add_argument(
        "--backend",
        choices=["builtin", "trl", "awr"],
        default="builtin",
        help="a small transformer on torch; policy gradients over a chat model by TRL; or advantage-weighted "
        "regression of a chat model on journaled runs",
    )
    train.add_argument("--out", default="trained", help="the folder for checkpoint, curve, card and report")
    train.add_argument("--seed", type=int, default=0, help="of weights, tasks, pools and rollouts")
    train.add_argument("--steps", type=_count, help="steps of policy gradients (default: the recipe's)")
    train.add_argument("--threads", type=_count, default=1, help="of torch")
    train.add_argument("--dear", action="store_true", help="weigh cost by 0.60 and wait by 0.35, not 0.30 and 0.10")
    builtin = train.add_argument_group("--backend builtin")
    builtin.add_argument(
        "--recipe",
        choices=["roles", "words", "words-large"],
        default="roles",
        help="how plans are written, and what is trained: subtasks by role; in words; in words, at a size for a GPU",
    )
    builtin.add_argument("--drill-steps", type=_count, help="steps of learning to read cards (default: the recipe's)")
    builtin.add_argument("--warm-steps", type=_count, help="steps of imitating the best of drawn plans")
    builtin.add_argument("--lessons", type=_count, default=1_000, help="held-out tasks of each comparison")
    builtin.add_argument("--gap", type=float, help="exit 1 unless this share of the gap is closed on held-out tasks")
    builtin.add_argument("--rounds", type=int, choices=[1, 2], default=1, help="2: learn a second round, from --from")
    builtin.add_argument("--from", dest="checkpoint", metavar="FOLDER", help="of a training run, or of its export")
    _chat_model(train)


def _chat_model(train: argparse.ArgumentParser) -> None:
    """The options of `--backend trl` and `--backend awr`."""
    asked = train.add_argument_group("--backend trl and --backend awr: what is trained")
    asked.add_argument("--model", help="a chat model: a folder, or a name that Hugging Face knows")
    asked.add_argument("--lora", type=int, default=32, metavar="RANK", help="of the adapters; 0 trains all weights")
    asked.add_argument("--questions", type=_count, default=16, help="of each step")
    asked.add_argument("--group", type=_count, default=16, help="plans for each question")
    asked.add_argument("--micro", type=_count, default=4, help="plans that pass through the model at a time")
    asked.add_argument("--rate", type=float, help="learning rate (default: 1e-5 for adapters, 1e-6 for all weights)")
    asked.add_argument("--completion", type=_count, default=1_024, help="most tokens of a plan")
    asked.add_argument("--every", type=_count, default=20, help="steps between checkpoints")
    asked.add_argument("--vllm", choices=["none", "colocate", "server"], default="none", help="what writes the plans")
    asked.add_argument("--vllm-url", default="", help="of a server started by `trl vllm-serve`")
    imitated = train.add_argument_group("what is imitated")
    imitated.add_argument(
        "--warm-start", metavar="FILE", help="rollouts to imitate, first or alone; `journal` reads the database"
    )
    imitated.add_argument("--epochs", type=_count, default=2, help="of imitation")
    imitated.add_argument("--batch", type=_count, default=8, help="plans of each step of imitation")
    imitated.add_argument("--imitation-rate", type=float, help="learning rate (default: 1e-4, 1e-5 for all weights)")
    imitated.add_argument(
        "--beta", type=float, default=0.3, help="of awr and builtin: the advantage that counts e times as much"
    )
    _agreed(imitated)
    rewarded = train.add_argument_group("--backend trl: what is asked, and where plans are carried out")
    rewarded.add_argument(
        "--tasks", metavar="FILE", help="a task set, as of `baton grade` (default: the rehearsal world)"
    )
    rewarded.add_argument("--rollouts", metavar="FILE", help="take the conversations from journaled runs")
    rewarded.add_argument("--random-pools", action="store_true", help="show each question only some of the workers")
    rewarded.add_argument("--url", help="of a Baton, with its key in BATON_API_KEY (default: one of its own)")
    rewarded.add_argument("--concurrency", type=_count, default=16, help="plans carried out at a time")
    rewarded.add_argument("--full-usd", type=float, default=0.006, help="dollars from which on cost counts in full")
    rewarded.add_argument(
        "--full-seconds", type=float, default=12.0, help="seconds from which on a wait counts in full"
    )
    _trusts(train)


def _conductor(commands: "Commands[argparse.ArgumentParser]") -> None:
    verbs = _command(commands, "conductor", "conductor", "put a trained conductor into service").add_subparsers(
        title="verbs", metavar="VERB", required=True
    )
    export = _command(
        verbs, "export", "conductor", "write a trained conductor as vLLM reads it, with its manifest; needs torch"
    )
    export.add_argument("trained", help="the folder that `baton train` has left")
    export.add_argument("out", help="a new folder")
    export.add_argument("--title", default="world", help="the version's name, before the hash of its weights")
    export.add_argument("--adapter-of", metavar="BASE", help="as a LoRA adapter of this exported folder")
    export.add_argument("--rank", type=_count, default=16, help="of an adapter")
    _describe(verbs)
    _serve(verbs)
    _versions(verbs)


def _describe(verbs: "Commands[argparse.ArgumentParser]") -> None:
    describe = _command(
        verbs,
        "describe",
        "conductor",
        "write the manifest of a model or an adapter made elsewhere, or anew that of one that `baton train` has left; "
        "what is not said stays as it is there",
    )
    describe.add_argument("folder", help="of weights, or of a LoRA adapter as peft saves it")
    describe.add_argument("--base", help="the described folder of the adapter's base (default: it is a whole model)")
    describe.add_argument("--title", help="the version's name, before the hash of its weights (default: conductor)")
    describe.add_argument("--prompt", choices=["general", "compact", "worded"], help="what it reads (default: general)")
    describe.add_argument("--grammar", choices=["guidance", "xgrammar"], help="its decoder (default: guidance)")
    describe.add_argument("--steps", type=_count, help="of the longest plan (default: the base's, else 5)")
    describe.add_argument("--workers", type=_count, help="of the largest pool (default: the base's, else 8)")
    describe.add_argument("--reward", help="the version of the reward that it was trained on")
    describe.add_argument("--commit", help="of the code that trained it")
    describe.add_argument("--golden", metavar="FILE", help="JSON lines of golden prompts (default: the base's)")


def _serve(verbs: "Commands[argparse.ArgumentParser]") -> None:
    serve = _command(verbs, "serve", "conductor", "start vLLM with a described or exported model")
    serve.add_argument("folder", help="of the model")
    serve.add_argument("--name", default="conductor", help="what it is called in the pool file, beside its version")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen; callers must not reach it")
    serve.add_argument("--port", type=_count, default=8000, help="where to listen")
    serve.add_argument("--context", type=_count, default=16_384, help="tokens, if the model has so many")
    serve.add_argument("--adapters", action="store_true", help="let adapters come and go while it runs")
    serve.add_argument("--rank", type=_count, default=32, help="the highest rank of an adapter")
    serve.add_argument("--python", default="python3", help="the interpreter of the environment that has vLLM")
    serve.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    serve.add_argument(
        "--flag", action="append", default=[], help="a further argument of vLLM: --flag=--enforce-eager; repeatable"
    )


def _versions(verbs: "Commands[argparse.ArgumentParser]") -> None:
    deploy = _command(verbs, "deploy", "conductor", "load a version into a running vLLM, if it fits and passes")
    shadow = _command(verbs, "shadow", "conductor", "compare a version with the live one on finished runs")
    canary = _command(verbs, "canary", "conductor", "let a version conduct a share of the runs")
    promote = _command(verbs, "promote", "conductor", "let a version conduct all runs")
    rollback = _command(verbs, "rollback", "conductor", "end the canary, or go back to what was live before")
    unload = _command(verbs, "unload", "conductor", "unload a version that does not conduct from the server")
    for verb in (deploy, shadow, canary, promote, rollback, unload):
        verb.add_argument("conductor", help="the conductor's worker in the pool file")
        verb.add_argument("--who", default="", help="whose decision it is (default: the system's user)")
    deploy.add_argument("folder", help="with weights and manifest")
    deploy.add_argument("--path", help="the same folder as the server sees it (default: as seen from here)")
    for verb in (shadow, canary, promote, unload):
        verb.add_argument("version", help="as `baton conductor ls` shows it")
    shadow.add_argument(
        "--since", type=_seconds, default=86_400.0, metavar="SPAN", help="runs of the last 30m, 7d, ..."
    )
    shadow.add_argument("--limit", type=_count, default=200, help="most plans to compare")
    canary.add_argument("share", type=_share, help="of the runs, such as 0.05")
    ls = _command(verbs, "ls", "conductor", "list the versions in force, and every change with its time and author")
    ls.add_argument("--limit", type=_count, default=20, help="most changes to list")


def _agreed(asked: argparse._ActionsContainer) -> None:
    """Add the options that choose the runs to learn from."""
    asked.add_argument(
        "--consent", metavar="LABEL", help="only runs with this label, or with it as a yes in their metadata"
    )
    asked.add_argument("--everybody", action="store_true", help="all callers have agreed")
    asked.add_argument("--without", action="append", default=[], metavar="LABEL", help="leave these out; repeatable")
    asked.add_argument("--held-out", type=float, default=0.1, help="share of conversations kept from training")
    asked.add_argument("--tier", help="only runs of this tier; of --backend trl, the tier to train for")
    asked.add_argument("--tenant", help="only runs of this tenant")
    asked.add_argument("--rated", action="store_true", help="only runs that somebody or a rule has rated")


def _rollouts(commands: "Commands[argparse.ArgumentParser]") -> None:
    rollouts = _command(
        commands,
        "rollouts",
        "rollouts",
        "write journaled runs for training: the conductor's prompt, the plan, and what it was worth",
    )
    rollouts.add_argument("file", help="JSON lines; only its owner can read it")
    rollouts.add_argument("--since", type=_seconds, metavar="SPAN", help="only runs of the last 30m, 12h, 7d, ...")
    _agreed(rollouts)


def _grade(commands: "Commands[argparse.ArgumentParser]") -> None:
    grade = _command(
        commands,
        "grade",
        "grade",
        "rate journaled runs by rules, and note what their callers did, apart from what callers said",
    )
    grade.add_argument("--tasks", metavar="FILE", help='JSON lines: {"question": "...", "grader": {"kind": ...}}')
    grade.add_argument(
        "--grader",
        action="append",
        default=[],
        metavar="JSON",
        help='a rule for every run, such as {"kind": "numeric", "expected": 42}; kinds: exact, numeric, choice, regex, '
        "schema, tests; repeatable",
    )
    _trusts(grade)
    grade.add_argument("--signs", action="store_true", help="note who cancelled, left, or asked the same again")
    grade.add_argument("--run", help="only this run: its id, a prefix of one, or last")
    grade.add_argument("--since", type=_seconds, metavar="SPAN", help="only runs of the last 30m, 12h, 7d, ...")
    for name in ("tier", "tenant"):
        grade.add_argument(f"--{name}", help=f"only runs of this {name}")
    grade.add_argument("--dry-run", action="store_true", help="store nothing")
    grade.add_argument("--json", action="store_true", help="every rating, as JSON")


def _calibrate(commands: "Commands[argparse.ArgumentParser]") -> None:
    calibrate = _command(
        commands,
        "calibrate",
        "calibrate",
        "give every worker the same built-in tasks, once each, and keep its pass rates: they get onto the cards that "
        "conductors are shown, and a learning policy begins with them; prints the cost first",
    )
    calibrate.add_argument(
        "--worker", action="append", default=[], metavar="WORKER", help="only this one; repeatable (default: all)"
    )
    calibrate.add_argument(
        "--each", type=int, choices=[1, 2, 3], default=2, help="tasks of each of 12 families at each of 3 levels"
    )
    calibrate.add_argument("--tokens", type=_count, default=2_048, help="most output tokens of one answer")
    calibrate.add_argument("--usd", type=_dollars, help="stop before more than so many dollars could be spent")
    calibrate.add_argument("--concurrency", type=_count, default=4, help="tasks that are worked on at one time")
    calibrate.add_argument("--again", action="store_true", help="also what was tried before (default: only the rest)")
    calibrate.add_argument("--yes", action="store_true", help="do not ask before money is spent")
    calibrate.add_argument("--show", action="store_true", help="only show what is known; ask nobody")
    calibrate.add_argument("--json", action="store_true", help="every trial, as JSON")


def _eval(commands: "Commands[argparse.ArgumentParser]") -> None:
    made = _command(
        commands,
        "eval",
        "eval",
        "give several arms of a tier the same tasks and compare accuracy, cost and latency, with intervals; "
        "without --url in its own service, over the configured pool",
    )
    made.add_argument("--url", help="a running service with [evaluation] arms = true in its pool file")
    made.add_argument("--key", help="its key, with runs:write and runs:read (default: BATON_API_KEY)")
    made.add_argument("--tasks", metavar="FILE", help="JSON lines as for baton grade (default: built-in tasks)")
    made.add_argument("--tier", default="baton-ultra", help="whose arms; over its pool and limits")
    made.add_argument(
        "--arms", help="tier, single:WORKER, sc:5, moa:3, static:pev, conductor:WORKER, random; by commas"
    )
    made.add_argument("--against", metavar="ARM", help="the reference (default: the tier as it is, else the first)")
    made.add_argument("--repeats", type=_count, default=3, help="of each task for each arm; averaged within the task")
    made.add_argument("--limit", type=_count, help="only the first so many tasks")
    made.add_argument("--out", default="evaluation", help="the folder for rows, table and plot; rows there are kept")
    made.add_argument("--with", action="append", default=[], metavar="DIR", dest="beside", help="rows to compare, too")
    made.add_argument("--report", action="store_true", help="send no request, only report")
    made.add_argument("--usd", type=_dollars, help="begin nothing more once the rows have cost so many dollars")
    made.add_argument("--concurrency", type=_count, default=8, help="requests at one time")
    made.add_argument("--temperature", type=float, help="of every request")
    made.add_argument("--effort", help="of every request: minimal, low, medium, high, ...")
    made.add_argument("--no-explore", action="store_true", help="a selector makes its best choice with certainty")
    made.add_argument("--seed", type=int, default=0, help="of the resampling")
    made.add_argument("--resamples", type=_count, default=10_000, help="of the tasks")
    made.add_argument("--json", action="store_true", help="the table as JSON")
    _trusts(made)


def _trusts(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust-code",
        action="store_true",
        help="run unit tests of answers' code even if the kernel does not allow the network to be cut off",
    )


def _offpolicy(commands: "Commands[argparse.ArgumentParser]") -> None:
    judge = _command(
        commands,
        "offpolicy",
        "offpolicy",
        "estimate what other policies would have earned, from rated runs whose plan was drawn at random; there is no "
        "verdict if too few runs support a policy",
    )
    judge.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="greedy (the log's own, without exploring), current (the selector as it chooses now), uniform, or "
        "'always ARM'; repeatable (default: those three and the arms that were taken most)",
    )
    judge.add_argument("--since", type=_seconds, metavar="SPAN", help="only runs of the last 30m, 12h, 7d, ...")
    for name in ("tier", "tenant"):
        judge.add_argument(f"--{name}", help=f"only runs of this {name}")
    judge.add_argument("--json", action="store_true", help="as JSON")


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError("must be a whole number from 1")
    return number


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError("must be a share of the runs between 0 and 1; `promote` is for all of them")
    return share


def _dollars(text: str) -> int:
    """Return an amount in dollars as micro-dollars."""
    amount = float(text)
    if not 0 < amount <= 1_000_000:
        raise argparse.ArgumentTypeError("must be a number of dollars above 0")
    return round(amount * 1_000_000)


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
    number, unit = text[:-1], text[-1:]
    if unit not in units or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError("must be a time span such as 90s, 30m, 12h, 30d or 52w")
    return float(int(number) * units[unit])
