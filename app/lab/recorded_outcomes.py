"""Recorded outcomes: prompts with the score and the cost of models that answered them, read from files.

Two kinds of data sets. In one with full information every prompt has an outcome of every model; a log has one outcome
for each prompt, that of the model which was asked. Formats, recognised line by line:

own JSON lines ... {"prompt": ..., "outcomes": {MODEL: {"score": 0 to 1, "usd": or "tokens": }}}, or one outcome a line:
                   {"prompt": ..., "model": ..., "score": ..., "usd": or "tokens": , "propensity": optional}
CSV .............. `prompt`, a column of scores for each model (numbers, True or False), and optionally `MODEL_usd` or
                   `MODEL_tokens`; `MODEL_response` is ignored. RouteLLM's recorded responses have this form.
RouterArena ...... its cached results: a file for each model, joined by `global_index`
LiteLLM .......... standard logging payloads (`response_cost`) and rows of its table of spend logs (`spend`), whose
                   prompts are in `proxy_server_request`: `messages` are stored there of realtime calls alone
OpenRouter ....... metadata of generations (`total_cost`), together with the stored `input` of each

A line that cannot be read is refused with its file and number, and with what to do. A call that failed is left out and
counted, since an outage is no wrong answer; so is a line without a score, and a prompt that lacks a model.
"""

import csv
import hashlib
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

Unit = Literal["usd", "tokens", "calls"]
"""The unit of costs; `calls`: the share of calls that go to the more expensive of two models."""
SUFFIXES = (".csv", ".jsonl")
FAILED = "the call failed"
UNRATED = "there is no score"
INCOMPLETE = "an outcome of some model is missing"
LEAST_ROWS = 20
"""The least number of prompts that can be split into training and held-out ones."""
FORMATS = (
    'give "prompt" with "outcomes", or "prompt" with "model" and "score" (deploy/docs/offpolicy.md has the formats)'
)
MOST_COST = 1e12
"""The most dollars or tokens of one call; sums of larger ones would soon be infinite."""
MOST_CHARS = 1 << 24
"""The length of the longest field of a CSV file that is read."""


class RecordsRefused(ValueError):
    """The files are no data set; the message names file, line and remedy."""


class Outcome(Struct, frozen=True):
    """The score of an answer, from 0 to 1, and its cost if it is known."""

    score: float
    cost: float | None = None
    unit: Unit = "usd"


class RecordedPrompt(Struct, frozen=True):
    """A prompt with its outcomes by model. `propensity` is the probability with which a log's model was drawn."""

    id: str
    prompt: str
    outcomes: Mapping[str, Outcome]
    propensity: float | None = None
    conversation: str = ""
    """The conversation that a log's line belongs to; an empty one is a conversation of its own."""


class Dataset(Struct, frozen=True):
    """Rows that either all have an outcome of every model (`full`) or one outcome each; costs are means of a call."""

    rows: Sequence[RecordedPrompt]
    models: tuple[str, ...]
    costs: Mapping[str, float]
    unit: Unit
    full: bool
    left_out: Mapping[str, int]

    @property
    def scores(self) -> Mapping[str, float]:
        """Return the mean score of each model over the rows that have an outcome of it."""
        scores_of_model: dict[str, list[float]] = {model: [] for model in self.models}
        for row in self.rows:
            for model, outcome in row.outcomes.items():
                scores_of_model[model].append(outcome.score)
        return {model: sum(scores) / len(scores) for model, scores in scores_of_model.items()}


def read(paths: Sequence[Path], scores: Mapping[str, float], costs: Mapping[str, float]) -> Dataset:
    """Read files, and the files of folders, as one data set. Lines with the same id, and the same prompt, are one row.

    `scores` are by the id of a line and replace its own; `costs` are dollars of a call by model and replace recorded
    ones. Raises `RecordsRefused`, and OSError for a file that cannot be opened.
    """
    left_out: Counter[str] = Counter()
    rows: dict[str, RecordedPrompt] = {}
    files: dict[str, Path] = {}
    """The file in which each id was met first."""
    for path in _files(paths):
        if path.suffix.lower() == ".csv":
            read_rows = _csv(path)
        else:
            read_rows = _json_lines(path, scores, left_out)
        for row in read_rows:
            if row.id in rows:
                row = _joined(rows[row.id], files[row.id], row, path)
            rows[row.id] = row
            files.setdefault(row.id, path)
    return _dataset(list(rows.values()), costs, left_out)


def _joined(first: RecordedPrompt, first_path: Path, row: RecordedPrompt, path: Path) -> RecordedPrompt:
    """Return a row together with the outcomes of an earlier one of the same id. Raises `RecordsRefused` if they
    contradict each other."""
    if first.prompt != row.prompt:
        raise RecordsRefused(f"{path}: the id {row.id} is that of another prompt in {first_path}; give it another")
    for model, outcome in row.outcomes.items():
        if first.outcomes.get(model, outcome) != outcome:
            id_ = row.id.removesuffix(f" {model}")
            raise RecordsRefused(f"{path}: for the id {id_} {first_path} has another outcome of {model}; leave out one")
    return replace(row, outcomes={**first.outcomes, **row.outcomes})


def read_scores(path: Path) -> Mapping[str, float]:
    """Read scores by the ids of a log's lines: JSON lines of `id` and `score`. Raises `RecordsRefused` and OSError."""
    scores = {}
    for place, value in _objects(path):
        if not value.get("id"):
            raise RecordsRefused(f'{place}: there is no "id"; give {{"id": "...", "score": 0 to 1}}')
        scores[str(value["id"])] = _score(value.get("score"), place)
    return scores


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        if not inside:
            raise RecordsRefused(
                f"{path}: the folder has no file that ends in .csv or .jsonl; name the files themselves"
            )
        yield from inside


def _dataset(rows: Sequence[RecordedPrompt], costs: Mapping[str, float], left_out: Counter[str]) -> Dataset:
    """Return the rows as a data set. With full information, rows that lack a model are left out."""
    models = tuple(sorted({model for row in rows for model in row.outcomes}))
    for model in models:
        if any(unicodedata.category(char) == "Cs" for char in model):
            raise RecordsRefused(f"the model's name {model!a} has half a pair of surrogates; correct it")
    usable = rows
    full = any(len(row.outcomes) > 1 for row in rows)
    if full:
        usable = [row for row in rows if len(row.outcomes) == len(models)]
    left_out[INCOMPLETE] += len(rows) - len(usable)
    reasons = {reason: count for reason, count in left_out.items() if count}
    if len(usable) < LEAST_ROWS:
        raise RecordsRefused(_too_few(rows, usable, models, reasons))
    if len(models) < 2:
        raise RecordsRefused(f"all outcomes are of {models[0]}; give those of a second model, too")
    unknown = sorted(set(costs) - set(models))
    if unknown:
        raise RecordsRefused(f"--cost: there is no model {unknown[0]}; the models are {', '.join(models)}")
    unit, mean_costs = _costs(usable, models, costs)
    return Dataset(usable, models, mean_costs, unit, full, reasons)


def _too_few(
    rows: Sequence[RecordedPrompt], usable: Sequence[RecordedPrompt], models: Sequence[str], reasons: Mapping[str, int]
) -> str:
    counts = Counter(model for row in rows for model in row.outcomes)
    outcomes = ", ".join(f"{counts[model]} of {model}" for model in models) or "none"
    facts = [f"outcomes: {outcomes}"]
    facts += [f"{count} were left out because {reason}" for reason, count in reasons.items()]
    remedy = "Give more lines, a score for each (--scores FILE for logs), or leave out the files of incomplete models"
    return f"usable prompts: {len(usable)}, and {LEAST_ROWS} are needed ({'; '.join(facts)}). {remedy}."


def _costs(
    rows: Sequence[RecordedPrompt], models: Sequence[str], stated_costs: Mapping[str, float]
) -> tuple[Unit, dict[str, float]]:
    """Return the unit, and the mean cost of a call of each model."""
    costs_of_model: dict[str, list[float]] = {model: [] for model in models if model not in stated_costs}
    units: set[Unit] = set()
    if stated_costs:
        units.add("usd")
    for row in rows:
        for model, outcome in row.outcomes.items():
            if outcome.cost is not None and model in costs_of_model:
                costs_of_model[model].append(outcome.cost)
                units.add(outcome.unit)
    missing = [model for model, costs in costs_of_model.items() if not costs]
    if missing == list(models) and len(models) == 2:
        return "calls", {}
    if missing:
        raise RecordsRefused(f"the cost of {missing[0]} is not recorded; give it with --cost {missing[0]}=DOLLARS")
    if len(units) > 1:
        raise RecordsRefused("some costs are in dollars and others in tokens; give --cost MODEL=DOLLARS for each model")
    mean_costs = {model: sum(costs) / len(costs) for model, costs in costs_of_model.items()}
    return next(iter(units)), {**mean_costs, **stated_costs}


# -- CSV


def _csv(path: Path) -> Iterator[RecordedPrompt]:
    csv.field_size_limit(MOST_CHARS)
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets begin a file with a byte order mark
        lines = csv.DictReader(file)
        header = _header(lines, path)
        models = _models(header)
        if "prompt" not in header or not models:
            columns = "the columns, with commas between them: prompt, and one for each model"
            raise RecordsRefused(f"{path}:1: the first line must name {columns}")
        for name, count in Counter(header).items():
            if count > 1:
                raise RecordsRefused(f"{path}:1: {count} columns are named {name}; give each a name of its own")
        while (line := _next(lines, path)) is not None:
            place = f"{path}:{lines.line_num}"
            if not line["prompt"] or None in line or None in line.values():
                raise RecordsRefused(
                    f"{place}: the line has not {len(header)} fields with a prompt; quote texts with commas"
                )
            outcomes = {model: _cell(line, model, place) for model in models}
            yield RecordedPrompt(line.get("id") or place, line["prompt"], outcomes)


def _header(lines: "csv.DictReader[str]", path: Path) -> list[str]:
    """Return the names of the columns; a column without a name is left out."""
    try:
        return [name for name in lines.fieldnames or () if name]
    except (csv.Error, UnicodeDecodeError) as error:
        raise _no_csv(path, 1, error) from None


def _next(lines: "csv.DictReader[str]", path: Path) -> dict[str, str] | None:
    try:
        return next(lines, None)
    except (csv.Error, UnicodeDecodeError) as error:
        raise _no_csv(path, lines.line_num + 1, error) from None


def _no_csv(path: Path, line: int, error: ValueError | csv.Error) -> RecordsRefused:
    return RecordsRefused(f"{path}:{line}: this is no CSV in UTF-8 ({error}); export it again")


def _models(header: Sequence[str]) -> list[str]:
    """Return the columns of scores: those that do not add something to another column."""
    no_scores = {"prompt", "id"}
    for name in header:
        no_scores |= {f"{name}_usd", f"{name}_tokens", f"{name}_response"}
    return [name for name in header if name not in no_scores]


def _cell(line: Mapping[str, str], model: str, place: str) -> Outcome:
    score = _score(line[model], f"{place}, column {model}")
    for unit in ("usd", "tokens"):
        if line.get(f"{model}_{unit}"):
            return Outcome(score, _cost(line[f"{model}_{unit}"], f"{place}, column {model}_{unit}"), unit)
    return Outcome(score)


# -- JSON lines


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's place and object."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                raise RecordsRefused(f"{place}: the line is no JSON; write one JSON object on each line") from None
            if not isinstance(value, dict):
                raise RecordsRefused(f"{place}: the line is no JSON object; {FORMATS}")
            yield place, value


def _json_lines(path: Path, scores: Mapping[str, float], left_out: Counter[str]) -> Iterator[RecordedPrompt]:
    for place, line in _objects(path):
        value = line
        if isinstance(line.get("data"), dict):
            value = {**line, **line["data"]}
        if "outcomes" in value:
            yield _with_outcomes(value, place)
        elif "global_index" in value:
            row = _router_arena(value, place)
            if row is None:
                left_out[FAILED] += 1
            else:
                yield row
        else:
            yield from _read_logged_row(value, place, scores, left_out)


def _with_outcomes(value: Mapping[str, Any], place: str) -> RecordedPrompt:
    """Return the row of a line in the own form that has an outcome of several models."""
    entries = value["outcomes"]
    are_objects = isinstance(entries, dict) and all(isinstance(outcome, dict) for outcome in entries.values())
    if not entries or not are_objects:
        raise RecordsRefused(f'{place}: "outcomes" must be an object of {{"score": ..., "usd": ...}} by model')
    outcomes = {model: _outcome(outcome, place) for model, outcome in entries.items()}
    return RecordedPrompt(str(value.get("id") or place), _prompt(value, place), outcomes)


def _outcome(value: Mapping[str, Any], place: str) -> Outcome:
    score = _score(value.get("score"), place)
    for unit in ("usd", "tokens"):
        if value.get(unit) is not None:
            return Outcome(score, _cost(value[unit], place), unit)
    return Outcome(score)


def _router_arena(value: Mapping[str, Any], place: str) -> RecordedPrompt | None:
    """Return the row; None for a call that failed or was not evaluated.

    Some of its metrics, such as METEOR, may fall a little below 0, which counts as 0.
    """
    evaluated = value.get("evaluation_result")
    if value.get("success") is False or not isinstance(evaluated, dict) or evaluated.get("score") is None:
        return None
    model = value.get("llm_selected")
    if not isinstance(model, str):
        raise RecordsRefused(f'{place}: there is no "llm_selected"; take the files of cached_results as they are')
    cost = None
    if evaluated.get("inference_cost") is not None:
        cost = _cost(evaluated["inference_cost"], place)
    prompt = _prompt({"prompt": value.get("question")}, place)
    score = _number(evaluated["score"])
    if score is not None and -1 <= score < 0:
        score = 0.0
    else:
        score = _score(evaluated["score"], place)
    return RecordedPrompt(str(value["global_index"]), prompt, {model: Outcome(score, cost)})


def _read_logged_row(
    value: Mapping[str, Any], place: str, scores: Mapping[str, float], left_out: Counter[str]
) -> Iterator[RecordedPrompt]:
    """Yield the row of a log, if it has one: Baton's own form, LiteLLM's or OpenRouter's."""
    model = value.get("model")
    if not isinstance(model, str) or not model:
        raise RecordsRefused(f'{place}: there is no "model"; {FORMATS}')
    id_ = str(value.get("id") or value.get("request_id") or place)
    score = scores.get(id_, _find_score(value))
    if value.get("status") == "failure" or value.get("cancelled") is True:
        left_out[FAILED] += 1
    elif score is None:
        left_out[UNRATED] += 1
    else:
        outcome = Outcome(_score(score, place), *_read_cost(value, place))
        chance = _propensity(value.get("propensity"), place)
        prompt = _prompt(value, place)
        yield RecordedPrompt(f"{id_} {model}", prompt, {model: outcome}, chance, _conversation(value))


def _find_score(value: Mapping[str, Any]) -> Any:
    """Return the score in the line, or in the metadata that the caller of LiteLLM sent; None if there is none. Of the
    latter a row of its spend logs has only `spend_logs_metadata`."""
    metadata = value.get("metadata")
    sources: list[Any] = [value, metadata]
    if isinstance(metadata, dict):
        sources += [metadata.get("requester_metadata"), metadata.get("spend_logs_metadata")]
    for source in sources:
        if isinstance(source, Mapping) and source.get("score") is not None:
            return source["score"]
    return None


def _read_cost(value: Mapping[str, Any], place: str) -> tuple[float | None, Unit]:
    for name in ("usd", "response_cost", "spend", "total_cost"):
        if value.get(name) is not None:
            return _cost(value[name], place), "usd"
    if value.get("tokens") is not None:
        return _cost(value["tokens"], place), "tokens"
    return None, "usd"


def _prompt(value: Mapping[str, Any], place: str) -> str:
    """Return the text of the last message of a user, from a prompt or from messages."""
    prompt = _request(value)
    if isinstance(prompt, list):
        prompt = _last_text_of_user(prompt)
    if not isinstance(prompt, str) or not prompt:
        remedy = "have the proxy store prompts (LiteLLM: store_prompts_in_spend_logs), or merge them into the line"
        raise RecordsRefused(f"{place}: there is no prompt; {remedy}")
    return prompt


def _request(value: Mapping[str, Any]) -> Any:
    """Return what was asked: a text, or messages; None if it was not stored."""
    request = value.get("prompt") or value.get("messages") or value.get("input") or value.get("proxy_server_request")
    if isinstance(request, dict):
        request = request.get("prompt") or request.get("messages") or request.get("input")
    return request


def _conversation(value: Mapping[str, Any]) -> str:
    """Return the name of a line's conversation: a hash of its messages up to the first one of the user."""
    request = _request(value)
    if isinstance(request, list):
        users = [n for n, message in enumerate(request) if isinstance(message, dict) and message.get("role") == "user"]
        request = request[: users[0] + 1]
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]


def _last_text_of_user(messages: Sequence[Any]) -> str | None:
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return _text(message.get("content"))
    return None


def _text(content: Any) -> str | None:
    """Return the text of a message's content, which may have parts; None if it has no text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return None


# -- values


def _score(value: Any, place: str) -> float:
    word = str(value).strip().casefold()
    if word == "true":
        return 1.0
    if word == "false":
        return 0.0
    score = _number(value)
    if score is None or not 0 <= score <= 1:
        raise RecordsRefused(f"{place}: the score is {value!r}; give a number from 0 to 1, or true or false")
    return score


def _cost(value: Any, place: str) -> float:
    cost = _number(value)
    if cost is None or not 0 <= cost <= MOST_COST:
        raise RecordsRefused(f"{place}: the cost is {value!r}; give a number from 0 to {MOST_COST:g}")
    return cost


def _propensity(value: Any, place: str) -> float | None:
    if value is None:
        return None
    propensity = _number(value)
    if propensity is None or not 0 < propensity <= 1:
        raise RecordsRefused(
            f"{place}: the propensity is {value!r}; give a probability above 0 and up to 1, or leave it out"
        )
    return propensity


def _number(value: Any) -> float | None:
    """Return a finite number, or None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # a whole number of JSON may be larger than any float
        return None
    if not math.isfinite(number):
        return None
    return number
