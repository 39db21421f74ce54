"""The policy in force, and another pool file compared with it, shown as a table, or tried on past runs."""

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import forms
from app.console.admin.sections import API, Administration, Cell, Table
from app.console.api import ApiError, Session, path_segment
from app.console.pages import form_lists
from app.core.console_path import PATH

QUESTIONS: Final = (
    ("diff", "Who would see what they do not see now?"),
    ("check", "Who may see what under it?"),
    ("try", "Which calls of past runs would it have refused?"),
)
FIELDS: Final = (
    forms.Field("question", "Question", "select", choices=QUESTIONS),
    forms.Field(
        "pool", "Pool file", "lines", "The text of the file (TOML). It is never taken into force here.", (), True
    ),
    forms.Field("since_seconds", "Days of past runs", "days", "For the last question.", value="1"),
)


def routes(admin: Administration) -> list[Route]:
    """Return the page of the policy."""

    async def show(request: Request, session: Session, form: forms.Form, answer: Any, status: int = 200) -> Response:
        policy = await admin.api.get(session, f"{API}/policy")
        rules = Table(
            "Table of the rules in force",
            ("Rule", "For requests with the labels", "Keeps away"),
            [_rule(rule) for rule in policy["rules"]],
            "The pool file in force has no rules.",
        )
        return await admin.show(
            request, session, "policy.html", status, policy=policy, rules=rules, form=form, answer=answer
        )

    async def ask(request: Request, session: Session) -> Response:
        return await show(request, session, _form(), None)

    async def answer(request: Request, session: Session) -> Response:
        lists = await form_lists(request)
        form = replace(_form(), entries=lists)
        body, faults = forms.read_fields(form.fields, lists)
        question = path_segment(body.pop("question", "diff"))
        since = body.pop("since_seconds", None)
        if faults:
            return await show(request, session, replace(form, faults=faults), None, 400)
        if question == "try" and since is not None:
            body["since_seconds"] = since
        try:
            reply = await admin.api.post(session, f"{API}/policy/{question}", body)
        except ApiError as error:
            if error.status == 401:
                raise
            faulty = replace(form, faults=forms.faults_of(error, form.fields))
            return await show(request, session, faulty, None, error.status)
        return await show(request, session, form, _answer(reply))

    return [admin.pages.route("/admin/policy", ask), admin.pages.route("/admin/policy", answer, "POST")]


def _form() -> forms.Form:
    return forms.Form("A pool file", "Ask", FIELDS)


def _answer(reply: Mapping[str, Any]) -> tuple[str, Table]:
    """Return a sentence, and the table behind it."""
    if reply["object"] == "policy.difference":
        return _difference(reply)
    if reply["object"] == "policy.trial":
        return _trial_table(reply)
    rows = [_permission_cells(row) for row in reply["shown"]]
    notes = "; ".join(reply["without_effect"])
    words = "Every rule of the file has an effect."
    if notes:
        words = f"Rules without effect: {notes}."
    for worker, labels in reply["declassifies"].items():
        words += f" What {worker} writes loses the labels {', '.join(labels)}."
    table = Table("Table of who may see what", ("Tier", "Labels", "May see it", "May not, and why"), rows, "No tiers.")
    return words, table


def _permission_cells(row: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(row["tier"]),
        Cell(", ".join(row["labels"]) or "none"),
        Cell(", ".join(row["recipients"]) or "nobody"),
        Cell(_reasons(row["excluded"]) or "nobody"),
    ]


def _difference(reply: Mapping[str, Any]) -> tuple[str, Table]:
    rows = [_witness_cells(witness) for witness in reply["witnesses"]]
    words = "The file shows nothing to anybody who does not see it now."
    if reply["widens"]:
        words = "The file widens who sees what; there is a witness for each tier and recipient."
    columns = ("Tier", "Labels", "Would see it", "Does not see it now, because")
    return words, Table("Table of witnesses", columns, rows, "There are no witnesses: nothing is widened.")


def _witness_cells(witness: Mapping[str, Any]) -> list[Cell]:
    recipient = f"{witness['worker']} ({witness['role']}, {witness['provider']})"
    if witness["through"]:
        recipient += f", as what {', then '.join(witness['through'])} makes of it"
    return [
        Cell(witness["tier"]),
        Cell(", ".join(witness["labels"]) or "none"),
        Cell(recipient),
        Cell(str(witness["before"])),
    ]


def _trial_table(reply: Mapping[str, Any]) -> tuple[str, Table]:
    rows = [_refused_run_cells(run) for run in reply["refused"]]
    more = ""
    if not reply["all"]:
        more = " There are older ones in that time, which were not looked at."
    words = f"Of {reply['runs']:,} runs {len(rows):,} have calls that the file would have refused.{more}"
    for run in reply["damaged"]:
        words += f" The journal of {run} cannot be read."
    columns = ("Run", "Tier", "Labels", "Refused calls, and why")
    return words, Table("Table of runs with refused calls", columns, rows, "No call would have been refused.")


def _refused_run_cells(run: Mapping[str, Any]) -> list[Cell]:
    return [
        Cell(run["run"], f"{PATH}/runs/{run['run']}"),
        Cell(run["tier"]),
        Cell(", ".join(run["labels"]) or "none"),
        Cell(_reasons(run["refused"])),
    ]


def _reasons(reasons: Mapping[str, str]) -> str:
    """Return names with the reason of each, as one line."""
    return "; ".join([f"{name}: {reason}" for name, reason in reasons.items()])


def _rule(rule: Mapping[str, Any]) -> list[Cell]:
    return [Cell(rule["name"]), Cell(", ".join(rule["labels"]) or "any"), Cell(", ".join(rule["excludes"]) or "nobody")]
