"""`baton eval` gives the same tasks to several arms, and reports their differences in accuracy and cost.

Rows are written as they are measured, to `rows.jsonl` in the folder; `evaluation.json` there describes the evaluation.
The same command continues where it was interrupted. The report is made from the rows alone.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from app.cli import event_loop, terminal
from app.cli.arguments import Arguments
from app.cli.embedded.gateway import run_embedded_service
from app.cli.learning import comparison_table, eval_requests, plot, sample_tasks, task_set
from app.cli.learning.eval_requests import Bench, Experiment
from app.cli.learning.sandbox import Sandbox
from app.cli.learning.task_set import GradedTask
from app.core.plan.arms import ORACLE
from app.core.pool.catalog import MILLION
from app.errors import ConfigInvalid, ServiceUnavailable
from app.lab.comparison import Table, table
from app.lab.grading import VERSION
from app.lab.measurements import Measure, incompatibilities, of_json
from app.network.http_client import async_client
from app.process.config import configure

UNCHANGED_TIER = "tier"
"""The name of the unchanged tier in `--arms`."""
SPARE_SECONDS = 30.0
"""Seconds that a request gets beyond its run's time limit."""


class ServedTier(Struct, frozen=True):
    """The tier as the service describes it: model ids, digest of the pool, time limit, and if workers are simulated."""

    models: tuple[str, ...]
    catalog: str
    seconds: float
    rehearsal: bool


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Measure the rows that are missing, then print the report. Wrong answers do not change the exit status."""
    terminal.log_to_stderr("warning")
    out = Path(args.out)
    if not args.report:
        tasks = _tasks(args, Sandbox(args.trust_code))
        out.mkdir(parents=True, exist_ok=True)
        event_loop.run(_carry_out(args, environ, now, tasks, out))
    _report(args, out)
    return 0


def _tasks(args: Arguments, sandbox: Sandbox) -> list[GradedTask]:
    def read(faults: list[str]) -> list[GradedTask]:
        if args.tasks is None:
            return task_set.parse(sample_tasks.lines(), "built-in tasks", sandbox.run, faults)
        return task_set.read(Path(args.tasks), sandbox.run, faults)

    tasks = task_set.require_valid(read)[: args.limit]
    walls = sandbox.require_isolation([task.grader for task in tasks])
    if walls:
        terminal.stderr().print(f"code from answers is isolated from: {', '.join(walls)}")
    return tasks


# -- asking


async def _carry_out(
    args: Arguments, environ: Mapping[str, str], now: Callable[[], float], tasks: Sequence[GradedTask], out: Path
) -> None:
    async with _client(args, environ, out) as client:
        tier = await _read_tier(client, args.tier, args.effort)
        experiment = _experiment(args, tasks, tier, _evaluation_id(args, tasks, tier, out))
        rows = out / "rows.jsonl"
        measures = by_place(out)
        places = [(task.id, arm, repeat) for task, arm, repeat in experiment.places()]
        total = len(places)
        remaining = len([place for place in places if place not in measures])
        is_cut_off = rows.exists() and rows.read_bytes()[-1:] not in (b"", b"\n")
        with rows.open("a", encoding="utf-8") as file, terminal.stderr().status("") as status:
            if is_cut_off:
                file.write("\n")

            def take(measure: Measure) -> None:
                nonlocal remaining
                file.write(json.dumps(asdict(measure)) + "\n")
                file.flush()
                remaining -= 1
                status.update(f"{total - remaining} of {total} rows")

            await eval_requests.carry_out(Bench(client, time.monotonic, now), experiment, measures, take)


@asynccontextmanager
async def _client(args: Arguments, environ: Mapping[str, str], out: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the service at `--url`, or of one inside this process."""
    if args.url is None:
        quick = {"BATON_REHEARSAL_DELAY": "0", **environ}  # simulated workers pause only if that is asked for
        async with run_embedded_service(configure(quick), out, args.concurrency) as client:
            yield client
        return
    key = args.key or environ.get("BATON_API_KEY", "")
    if not key:
        raise ConfigInvalid(["--key: the service needs a key; give one here or in BATON_API_KEY"])
    url = args.url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"}
    async with async_client(base_url=url, headers=headers, connections=args.concurrency) as client:
        yield client


async def _read_tier(client: httpx.AsyncClient, tier: str, effort: str | None) -> ServedTier:
    try:
        reply = await client.get("/v1/models", timeout=eval_requests.READ_SECONDS)
        models = {model["id"]: model["baton"] for model in reply.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        raise ServiceUnavailable("The list of models cannot be read; check --url and --key.") from None
    if tier not in models or models[tier]["tier"] != tier:
        raise ConfigInvalid([f"--tier: the service has no tier {tier}, or the key may not use it"])
    description = models[tier]
    limits = description["efforts"][description["effort"]]
    if effort in description["efforts"]:
        limits = description["efforts"][effort]
    names = [tier]
    for name, model in models.items():
        if model["tier"] == tier and name.startswith(f"{tier}:"):
            names.append(name)
    return ServedTier(tuple(names), description["catalog"], limits["seconds"], description["rehearsal"])


def _arms(args: Arguments, tier: ServedTier) -> tuple[str, ...]:
    """Return the model ids of the arms. Without `--arms` all are taken, if they cost nothing."""
    if args.arms is None:
        if not tier.rehearsal:
            names = ", ".join([_short(model) for model in tier.models])
            raise ConfigInvalid([f"--arms: real models cost money; choose among {names}"])
        return tier.models
    return tuple([model_id(name, args.tier) for name in _arms_of_option(args.arms)])


def _arms_of_option(text: str) -> list[str]:
    """Return the names in `--arms`, each once; the oracle is no arm that could be asked."""
    return [name for name in dict.fromkeys(text.split(",")) if name not in ("", ORACLE)]


def model_id(arm: str, tier: str) -> str:
    """Return the model id of an arm: `single:x` becomes `baton-ultra:single:x`."""
    if arm == UNCHANGED_TIER:
        return tier
    if arm == tier or arm.startswith(f"{tier}:"):
        return arm
    return f"{tier}:{arm}"


def _short(model: str) -> str:
    return model.partition(":")[2] or UNCHANGED_TIER


def _experiment(args: Arguments, tasks: Sequence[GradedTask], tier: ServedTier, name: str) -> Experiment:
    usd = None
    if args.usd is not None:
        usd = args.usd / MILLION
    return Experiment(
        id=name,
        tasks=tuple(tasks),
        arms=_arms(args, tier),
        repeats=args.repeats,
        digest=task_set.digest(tasks),
        catalog=tier.catalog,
        concurrency=args.concurrency,
        deadline=tier.seconds + SPARE_SECONDS,
        usd=usd,
        options=_options(args),
    )


def _options(args: Arguments) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if args.temperature is not None:
        options["temperature"] = args.temperature
    if args.effort is not None:
        options["reasoning_effort"] = args.effort
    if args.no_explore:
        options["baton"] = {"explore": False}
    return options


def _evaluation_id(args: Arguments, tasks: Sequence[GradedTask], tier: ServedTier, out: Path) -> str:
    """Return the evaluation's id. Raises `ConfigInvalid` if the folder has rows of another evaluation."""
    path = out / "evaluation.json"
    description = {
        "tasks": task_set.digest(tasks),
        "catalog": tier.catalog,
        "grading": VERSION,
        "options": _options(args),
    }
    names = {
        "tasks": "another task set",
        "catalog": "another pool",
        "grading": "other graders",
        "options": "other options",
    }
    if path.exists():
        record = _description(path)
        differences = [words for name, words in names.items() if record.get(name) != description[name]]
        if not differences:
            return str(record["id"])
        if by_place(out):
            raise ConfigInvalid([f"--out: {out} holds rows of {' and '.join(differences)}; name another folder"])
    new_record = {"id": secrets.token_hex(8), **description, "code": version("baton"), "url": args.url}
    part = path.with_suffix(".part")  # a process that is killed leaves all of the description, or none
    part.write_text(json.dumps(new_record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return str(new_record["id"])


def _description(path: Path) -> dict[str, Any]:
    """Return the description of an evaluation. Raises `ConfigInvalid` for a file that holds none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or "id" not in record:
        raise ConfigInvalid([f"{path}: it does not describe an evaluation; name another folder"])
    return record


# -- reporting


def _rows(path: Path) -> Iterator[Measure]:
    """Yield the rows of a file. A last line that was cut off is left out, and so measured again."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):
                yield of_json(json.loads(line))


def by_place(folder: Path) -> dict[tuple[str, str, int], Measure]:
    """Return the rows of a folder by place, the latest if there are several."""
    return {row.place: row for row in _rows(folder / "rows.jsonl")}


def _report(args: Arguments, out: Path) -> None:
    comparison = _table(args, [Path(folder) for folder in (args.out, *args.beside)])
    document = json.dumps(msgspec.to_builtins(comparison), indent=1)
    (out / "table.json").write_text(document + "\n", encoding="utf-8")
    has_plot = plot.png(comparison, out / "cost-accuracy.png")
    if args.json:
        print(document)
        return
    console = terminal.stdout()
    console.print(comparison_table.draw(comparison))
    console.print(plot.characters(comparison))
    places = f"\n{out}/rows.jsonl, {out}/table.json"
    if has_plot:
        places += f", {out}/cost-accuracy.png"
    else:
        places += " (a PNG too, where matplotlib is installed)"
    console.print(places)


def _comparable_rows(folders: Sequence[Path]) -> list[Measure]:
    """Return the rows of all folders. Raises `ConfigInvalid` if they cannot be compared."""
    rows: list[Measure] = []
    faults: list[str] = []
    options: list[Any] = []
    for folder in folders:
        measures = by_place(folder)
        rows += measures.values()
        if not measures:
            faults.append(f"{folder}: there are no rows of an evaluation; name a folder that has rows.jsonl")
        path = folder / "evaluation.json"
        if path.exists():
            record = _description(path)
            if record.get("options") not in options:
                options.append(record.get("options"))
    if len(options) > 1:
        texts = ", ".join([json.dumps(value) for value in options])
        faults.append(f"--with: rows of other options cannot be compared: {texts}")
    faults += incompatibilities(rows)
    duplicates = len(rows) - len({row.place for row in rows})
    if duplicates:
        faults.append(f"--with: {duplicates} rows are of the same task, arm and repeat; compare folders of other arms")
    if faults:
        raise ConfigInvalid(faults)
    return rows


def _table(args: Arguments, folders: Sequence[Path]) -> Table:
    rows = _comparable_rows(folders)
    arms = sorted({row.arm for row in rows})
    if args.arms is not None:
        models = [model_id(name, args.tier) for name in _arms_of_option(args.arms)]
        measured_arms, arms = arms, [arm for arm in dict.fromkeys(models) if arm in arms]
        if not arms:
            raise ConfigInvalid([f"--arms: there are no rows of these; there are rows of {', '.join(measured_arms)}"])
    if args.against is not None:
        reference = model_id(args.against, args.tier)
    elif args.tier in arms:
        reference = args.tier
    else:
        reference = arms[0]
    if reference not in arms:
        raise ConfigInvalid([f"--against: there is no row of {reference}; there are rows of {', '.join(arms)}"])
    try:
        return table(rows, arms, reference, args.seed, args.resamples)
    except ValueError as error:
        raise ConfigInvalid([f"{args.out}: {error}; let the evaluation go on"]) from None
