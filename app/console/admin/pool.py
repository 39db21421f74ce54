"""The workers of the pool with their breakers, and the versions of conductors."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, ListPage, Person, Table, at
from app.console.api import ApiError, Session, path_segment
from app.console.templating import NOTHING, count, moment, percent, usd
from app.core.console_path import PATH

POOL_FILE: Final = "the pool file's model"
"""The words for the empty version."""
BREAKERS_HERE: Final = (
    "A breaker is open while a worker is left out because its calls fail, and half open while it is tried."
)
BREAKERS_ELSEWHERE: Final = (
    "This process is a gateway, which calls no workers: each engine has breakers of its own, in its metrics. "
    "The column has what the newest plans say: whom they left out because its calls failed."
)
CALLS: Final = "Calls are those of the last hour, of the runs that you may see; costs are at present prices."
COLUMNS: Final = ("Worker", "Breaker", "Calls", "Went well", "About")
"""The columns that say how a worker fares."""
UNKNOWN_FIGURES: Final[Mapping[str, Any]] = {"calls": None, "success_rate": None, "about_usd": None, "ejected": None}
"""The figures of a worker whose calls cannot be read."""
NO_CALLS: Final[Mapping[str, Any]] = {**UNKNOWN_FIGURES, "calls": 0, "ejected": ""}
"""The figures of a worker that was not called."""


def routes(admin: Administration) -> list[Route]:
    """Return the pages of workers and conductors."""

    async def show_workers(request: Request, session: Session) -> Response:
        workers = (await admin.api.get(session, f"{API}/workers"))["data"]
        calls = await _calls(admin, session)
        table = Table(
            "Table of workers",
            (*COLUMNS, "Provider", "Model", "Tiers", "Region", "Clearance", "Kept away by the rules"),
            [_worker(worker, calls[worker["name"]]) for worker in workers],
            "The pool file in force has no workers.",
        )
        breakers = BREAKERS_ELSEWHERE
        if any(worker["state"] is not None for worker in workers):
            breakers = BREAKERS_HERE
        hint = f"{breakers} {CALLS}"
        return await admin.show_list(request, session, ListPage("Workers", table, hint=hint))

    async def show_conductors(request: Request, session: Session) -> Response:
        conductors = (await admin.api.get(session, f"{API}/conductors"))["data"]
        person = await admin.person(request, session)
        table = Table(
            "Table of conductors",
            ("Conductor", "Live", "Canary", "Share", "Loaded", "Live before", "Actions"),
            [_conductor(conductor, person) for conductor in conductors],
            "No tier of the pool file has a model as its conductor.",
        )
        hint = "`baton conductor deploy` loads a version and checks it."
        return await admin.show_list(request, session, ListPage("Conductors", table, hint=hint))

    return [
        admin.pages.route("/admin/workers", show_workers),
        admin.pages.route("/admin/conductors", show_conductors),
        *_canary(admin),
        *_promote(admin),
        *_roll_back(admin),
    ]


async def _calls(admin: Administration, session: Session) -> Mapping[str, Mapping[str, Any]]:
    """Return the figures of each worker's calls in the last hour, which are not known where the person may not read
    runs."""
    try:
        overview = await admin.api.get(session, "/v1/overview", period="hour")
    except ApiError as error:
        if error.status == 401:
            raise
        return defaultdict(lambda: UNKNOWN_FIGURES)
    ejections: dict[str, str] = {}
    figures: dict[str, Mapping[str, Any]] = {}
    for breaker in overview["ejected"]:
        name = breaker["worker"]
        ejections[name] = f"left out at {moment(breaker['at'])}"
        figures[name] = {**NO_CALLS, "ejected": ejections[name]}
    for worker in overview["workers"]:
        figures[worker["worker"]] = {**worker, "ejected": ejections.get(worker["worker"], "")}
    return defaultdict(lambda: NO_CALLS, figures)


def _ejection_text(ejection: str | None) -> str:
    """Return the words about a worker whose breaker this process does not have; None where runs cannot be read."""
    if ejection is None:
        return "not measured here"
    return ejection or "not left out"


def _worker(worker: Mapping[str, Any], calls: Mapping[str, Any]) -> list[Cell]:
    breaker = Cell(_ejection_text(calls["ejected"]))
    if worker["state"]:
        breaker = Cell(worker["state"].replace("_", " "), kind="state")
    return [
        Cell(worker["name"], f"{PATH}/runs?worker={path_segment(worker['name'])}"),
        breaker,
        Cell(count(calls["calls"]), kind="number"),
        Cell(percent(calls["success_rate"]), kind="number"),
        Cell(usd(calls["about_usd"]), kind="number"),
        Cell(worker["provider"]),
        Cell(worker["model"]),
        Cell(", ".join(worker["tiers"]) or "none"),
        Cell(worker["region"] or "unknown"),
        Cell(", ".join(worker["clearance"]) or "none"),
        Cell(", ".join(worker["rules"]) or "none"),
    ]


def _conductor(conductor: Mapping[str, Any], person: Person) -> list[Cell]:
    links: list[tuple[str, str]] = []
    if person.may("changes:read"):
        links.append(("What happened", at("changes", target=conductor["name"])))
    if person.may("conductors:write"):
        verbs = (("Canary", "canary"), ("Promote", "promote"), ("Roll back", "rollback"))
        links += [(words, at("conductors", conductor["name"], verb)) for words, verb in verbs]
    share = NOTHING
    if conductor["canary"]:
        share = percent(conductor["share"])
    earlier = [version or POOL_FILE for version in reversed(conductor["before"])]
    return [
        Cell(conductor["name"]),
        Cell(conductor["live"] or POOL_FILE),
        Cell(conductor["canary"] or NOTHING),
        Cell(share, kind="number"),
        Cell(", ".join(conductor["loaded"]) or "none"),
        Cell(", ".join(earlier) or "none"),
        Cell("", links=links),
    ]


def _canary(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        conductor = await _read_conductor(admin, request, session)
        share = forms.Field("share", "Share of the runs", "number", "Between 0 and 1.", required=True, value="0.05")
        says = ("The version conducts this share of the runs; engines follow within two seconds.",)
        return forms.Form(
            f"Canary of {conductor['name']}", "Begin it", (_version(conductor), share), at("conductors"), says
        )

    return admin.form("/admin/conductors/{conductor}/canary", ask, _act(admin, "canary"))


def _promote(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        conductor = await _read_conductor(admin, request, session)
        says = ["The version conducts all runs; engines follow within two seconds. It can be rolled back."]
        says += await _evidence(admin, session, conductor)
        force = forms.Field("force", "Reason to promote it although conditions do not hold", hint="It is recorded.")
        fields = (_version(conductor), force)
        return forms.Form(f"Promote a version of {conductor['name']}", "Promote it", fields, at("conductors"), says)

    return admin.form("/admin/conductors/{conductor}/promote", ask, _act(admin, "promote"))


def _roll_back(admin: Administration) -> list[Route]:
    async def ask(request: Request, session: Session) -> forms.Form:
        conductor = await _read_conductor(admin, request, session)
        if conductor["canary"]:
            sentence = f"The canary {conductor['canary']} ends."
        elif conductor["live"]:
            before = POOL_FILE
            if conductor["before"]:
                before = conductor["before"][-1] or POOL_FILE
            sentence = f"Instead of {conductor['live']} {before} conducts."
        else:
            sentence = "There is nothing to roll back: the pool file's own model conducts."
        return forms.Form(f"Roll {conductor['name']} back", "Roll it back", (), at("conductors"), (sentence,))

    return admin.form("/admin/conductors/{conductor}/rollback", ask, _act(admin, "rollback"))


def _act(admin: Administration, verb: str) -> forms.Act:
    async def act(request: Request, session: Session, submission: forms.Submission) -> None:
        path = f"{API}/conductors/{path_segment(request.path_params['conductor'])}/{verb}"
        await admin.api.post(session, path, submission.body, **submission.headers)

    return act


async def _read_conductor(admin: Administration, request: Request, session: Session) -> dict[str, Any]:
    name = request.path_params["conductor"]
    for conductor in (await admin.api.get(session, f"{API}/conductors"))["data"]:
        if conductor["name"] == name:
            reply: dict[str, Any] = conductor
            return reply
    return {"name": name, "live": "", "canary": "", "share": 0.0, "loaded": [], "before": []}


def _version(conductor: Mapping[str, Any]) -> forms.Field:
    versions = _promotable(conductor)
    value = conductor["canary"]
    if not value and versions:
        value = versions[0]
    choices = [(version, version) for version in versions]
    return forms.Field("version", "Version", "select", choices=choices, required=True, value=value)


def _promotable(conductor: Mapping[str, Any]) -> list[str]:
    """Return the versions that are loaded and do not conduct already."""
    return [version for version in conductor["loaded"] if version != conductor["live"]]


async def _evidence(admin: Administration, session: Session, conductor: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the conditions of promotion for each version that may be promoted."""
    sentences = []
    for version in _promotable(conductor):
        path = f"{API}/conductors/{path_segment(conductor['name'])}/evidence"
        evidence = await admin.api.get(session, path, version=version)
        if not evidence["tiers"]:
            sentences.append(f"{version}: no tier states conditions for a promotion.")
        for tier in evidence["tiers"]:
            verdict = "may not be promoted without a reason"
            if tier["promotable"]:
                verdict = "may be promoted"
            conditions = "; ".join([_words(condition) for condition in tier["conditions"]])
            sentences.append(f"{version} on {tier['tier']} {verdict}: {conditions}.")
    return sentences


def _words(condition: Mapping[str, Any]) -> str:
    interval = condition["found"]
    finding = "nothing is known"
    if interval is not None:
        value, low, high = [_figure(interval[name]) for name in ("value", "low", "high")]
        finding = f"{value} was found, between {low} and {high}"
    outcome = condition["outcome"].replace("_", " ")
    return f"{condition['name']} of {condition['limit']:g}: {outcome} ({finding}; {condition['count']:,} compared)"


def _figure(value: float | None) -> str:
    if value is None:
        return "no bound"
    return f"{value:.4f}"
