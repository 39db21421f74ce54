"""Falsifications of the ledger of disclosures, and of what the journal says about disclosures."""

from tests.audit.forgery import ForgedRun, Tamper, case, in_first

EVERY = "single conducted retried"
INTENDED = "call.intended"


def in_ledger(**columns: object) -> Tamper:
    """Other values in the first row."""
    return lambda run: run.disclosures[0].update(columns)


def other_row(run: ForgedRun) -> None:
    run.disclosures.append(run.disclosures[0] | {"call": "call_that_never_was"})


def saw_more(run: ForgedRun) -> None:
    row = next(row for row in run.disclosures if row["kind"] == "worker" and not row["saw_steps"])
    row["saw_steps"] = ",0,1,"


ALTERED = {
    "recipient": "nobody",
    "kind": "embedder",
    "provider": "another",
    "model": "another",
    "region": "moon",
    "tenant": "another",
    "key": "another",
    "labels": '["public"]',
    "saw_results": True,
    "unseen": ",7,",
    "planned_by": "caller",
    "outcome": "cancelled?",
    "bytes": 1,
    "input_tokens": 10**9,
    "output_tokens": 10**9,
    "at": 1.0,
    "step": 99,
    "attempt": 9,
    "passed_over": '[{"reason":"failing","worker":"x"}]',
}
CASES = (
    case("disclosure-missing", "a row is deleted", EVERY, lambda run: run.disclosures.pop(0)),
    case("disclosure-surplus", "a row is invented", EVERY, other_row),
    case("disclosure-altered", "a step is added to what was seen", EVERY, saw_more),
    case("disclosure-altered", "the caller's words are denied", "single retried", in_ledger(saw_user=False)),
    *[
        case("disclosure-altered", f"another {name}", EVERY, in_ledger(**{name: value}))
        for name, value in ALTERED.items()
    ],
    case(
        "disclosed-wrong", "another decider", EVERY, in_first(INTENDED, lambda body: body.update(planned_by="caller"))
    ),
    case("disclosed-wrong", "another region", EVERY, in_first(INTENDED, lambda body: body.update(region="moon"))),
    case("disclosed-wrong", "labels", EVERY, in_first(INTENDED, lambda body: body.update(labels=["public"]))),
    case("disclosed-wrong", "unseen steps", EVERY, in_first(INTENDED, lambda body: body.update(unseen=[0]))),
    case("disclosed-wrong", "results of tools", EVERY, in_first(INTENDED, lambda body: body.update(results=True))),
    case("disclosed-wrong", "another origin", EVERY, in_first(INTENDED, lambda body: body.update(origin="shadow"))),
)
