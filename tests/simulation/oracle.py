"""Judge if the promises were kept, from the tables, from what workers received and from what callers received.

Nothing here uses the product's folding, deciding or accounting: it reads rows and counts. Every check is a function
from one run's evidence to sentences that say what is wrong. Some promises hold only where certain faults did not
happen: then the check asks for `case.only`.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from app.core.run.kinds import OUTCOMES
from app.engine.delivery.messages import TurnEnd
from tests.simulation import approved
from tests.simulation.callers import CallerConnection
from tests.simulation.case import OTHERS, Case, cases_of
from tests.simulation.loop import EPOCH
from tests.simulation.sight import TOKEN, steps_see_what_is_granted
from tests.simulation.witness import ENDINGS, OPENS, Fact
from tests.simulation.world import PATIENCE, World

HARM = ("process.", "crash at ", "freeze at ")
CALLED = 0.5
"""Seconds within which somebody who was called for a run, and is well, drives it."""
ABANDONED = "tool_results_missing"
LAST_WORDS = ("step.skipped", "step.failed")


Check = Callable[[Case], Iterator[str]]


def judge(world: World) -> list[str]:
    """Everything that is wrong with a world that has come to rest."""
    cases = list(cases_of(world))
    violations = [
        f"oracle.{check.__name__}: {case.run}: {sentence}"
        for case in cases
        for check in CHECKS
        for sentence in _run_check(check, case)
    ]
    violations += [f"oracle.strangers: {sentence}" for sentence in _strangers(world, cases)]
    violations += [f"oracle.liveness: {sentence}" for sentence in _liveness(world)]
    return violations


def _run_check(check: Check, case: Case) -> Iterator[str]:
    """Return the objections of a check. Evidence that it cannot read is an objection as well."""
    try:
        yield from check(case)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        yield f"its evidence makes no sense: {error!r}"


def the_journal_has_no_gaps(case: Case) -> Iterator[str]:
    numbers = [fact.seq for fact in case.facts]
    if numbers != list(range(1, len(numbers) + 1)) or case.row["seq"] != len(numbers):
        yield f"its events are numbered {numbers}, its row says {case.row['seq']}"
    if [fact.kind for fact in case.facts[:1]] != ["run.admitted"]:
        yield "it does not begin with its admission"
    if len(case.bodies("run.admitted")) != 1:
        yield "it was admitted more than once"


def it_ends_once(case: Case) -> Iterator[str]:
    places = [place for place, fact in enumerate(case.facts) if fact.kind in ENDINGS]
    if len(places) != 1:
        yield f"it has {len(places)} ends"
        return
    after = {fact.kind for fact in case.facts[places[0] + 1 :]}
    if after - {"call.finished"}:
        yield f"after its end came {sorted(after)}"
    kind = case.facts[places[0]].kind.removeprefix("run.")
    if case.row["state"] != kind or case.row["ended_at"] is None:
        yield f"its journal ends with {kind}, its row says {case.row['state']}"


def it_ends_in_time(case: Case) -> Iterator[str]:
    ends = [fact.at for fact in case.facts if fact.kind in ENDINGS]
    deadline = case.row["deadline"] - EPOCH
    limit = deadline + (PATIENCE if not case.calm else 5.0)
    if ends and ends[0] > limit + 20.0:  # a clock may have been wrong by that much
        yield f"it ended {ends[0] - deadline:.0f} s after its deadline"


def each_intent_has_one_outcome(case: Case) -> Iterator[str]:
    intended = [fact for fact in case.facts if fact.kind == "call.intended"]
    finished = [fact for fact in case.facts if fact.kind == "call.finished"]
    opened = {fact.body["call"]: fact.seq for fact in intended}
    for call, count in Counter(fact.body["call"] for fact in intended).items():
        if count > 1:
            yield f"{call} was intended {count} times"
    closed = Counter(fact.body["call"] for fact in finished)
    for call in opened:
        if closed[call] != 1:
            yield f"{call} has {closed[call]} outcomes"
    for fact in finished:
        if opened.get(fact.body["call"], fact.seq) >= fact.seq:
            yield f"{fact.body['call']} has an outcome before its intent"
        if fact.body["outcome"] not in OUTCOMES:
            yield f"{fact.body['outcome']} is no outcome"


def no_step_runs_after_it_is_done(case: Case) -> Iterator[str]:
    finished_steps: set[int] = set()
    for fact in case.facts:
        n = fact.body.get("n")
        if fact.kind == "step.done":
            if n in finished_steps:
                yield f"step {n} was done twice"
            finished_steps.add(n)
        elif fact.kind in ("call.intended", "step.queued") and n in finished_steps:
            yield f"step {n} was begun again after it was done"


def attempts_are_counted(case: Case) -> Iterator[str]:
    allowed = case.facts[0].body["limits"]["attempts"]
    tried: Counter[tuple[int, int]] = Counter()
    refused: Counter[tuple[int, int]] = Counter()
    turn = 0
    for fact in case.facts:
        turn += fact.kind == "run.resumed"
        place = fact.body.get("n"), turn
        if fact.kind == "call.intended" and fact.body["n"] is not None:
            tried[place] += 1
        refused[place] += fact.kind == "call.finished" and fact.body.get("error") == "worker_rate_limited"
    for (n, turn), count in tried.items():
        if count - min(refused[n, turn], allowed) > allowed:
            yield f"step {n} had {count} attempts of {allowed} in turn {turn}"
    numbers = defaultdict(list)
    for body in case.bodies("call.intended"):
        numbers[body["n"]].append(body["attempt"])
    for n, given in numbers.items():
        if n is not None and given != list(range(1, len(given) + 1)):
            yield f"the attempts of step {n} are numbered {given}"


def one_plan_is_made(case: Case) -> Iterator[str]:
    words = [fact.kind.removeprefix("plan.") for fact in case.facts if fact.kind.startswith("plan.")]
    shape = " ".join(word for word in words if word != "step")
    if not re.fullmatch(r"((opened rejected ?)*opened accepted ?)*(opened rejected ?)*(opened)?", shape):
        yield f"its proposals went: {shape}"
    planned = [body["n"] for body in case.bodies("plan.step")]
    if planned != list(range(len(planned))):
        yield f"its steps are numbered {planned}"
    opened = len(case.bodies("plan.opened"))
    calls = sum(body["n"] is None for body in case.bodies("call.intended"))
    if calls > opened:
        yield f"{calls} planning calls were made for {opened} proposals"
    for body in case.bodies("plan.step"):
        if "<evil" in case.texts.get(body["subtask"], ""):
            yield f"step {body['n']} was planned by a worker's output"


def the_books_balance(case: Case) -> Iterator[str]:
    row = case.row
    if row["held_usd"] or row["held_tokens"]:
        yield f"{row['held_usd']} micro-dollars and {row['held_tokens']} tokens are still held"
    usd = sum(body["usd"] for body in case.bodies("call.finished"))
    usages = [body["usage"] for body in case.bodies("call.finished")]
    tokens = sum(usage["input"] + usage["output"] for usage in usages)
    if (row["spent_usd"], row["spent_tokens"]) != (usd, tokens):
        yield f"its row spent {row['spent_usd']} micro-dollars, {row['spent_tokens']} tokens; its calls {usd}, {tokens}"


def calls_are_what_was_intended(case: Case) -> Iterator[str]:
    """A call that was received and one that was intended are the same call if they have the same bytes."""
    outcomes = case.outcomes
    intents = defaultdict(list)
    for body in case.bodies("call.intended"):
        intents[body["request"]].append(body)
    received = Counter(call.request for call in case.received)
    for request, bodies in intents.items():
        results = [outcomes.get(body["call"], {}).get("outcome") for body in bodies]
        sure = sum(result in ("ok", "truncated") for result in results)
        if not sure <= received[request] <= len(bodies):
            yield f"{len(bodies)} calls were intended, {results} came of them, {received[request]} were received"


def what_was_billed_was_counted(case: Case) -> Iterator[str]:
    outcomes = case.outcomes
    counted: Counter[str] = Counter()
    for body in case.bodies("call.intended"):
        counted[body["request"]] += outcomes.get(body["call"], {}).get("usd", 0)
    billed: Counter[str] = Counter()
    for call in case.received:
        billed[call.request] += call.worker.price.cost(call.billed)
    for request, usd in billed.items():
        if usd > counted[request]:
            yield f"a worker billed {usd} micro-dollars, {counted[request]} were counted"


def answers_are_the_workers(case: Case) -> Iterator[str]:
    """A worker of this run has sent what the journal has as a step's output, whole or up to the caller's deadline."""
    texts = {call.text for call in case.received}
    cut = {body["call"] for body in case.bodies("call.finished") if body.get("out_of_time")}
    for body in case.bodies("step.done"):
        text = case.texts.get(body["output"], "")
        if case.erased and body["output"] not in case.texts:
            continue  # it was written when nothing was to be kept any more
        whole = text in texts or (body["call"] in cut and any(text_said.startswith(text) for text_said in texts))
        if not whole or len(text) != body["chars"]:
            yield f"step {body['n']} is done with words that no worker said"


def the_caller_is_told_the_truth(case: Case) -> Iterator[str]:
    answer = next((case.texts.get(body["answer"], "") for body in case.bodies("run.succeeded") if "answer" in body), "")
    for hearing in case.hearings:
        if len(hearing.ended) > 1:
            yield f"a caller was told of {len(hearing.ended)} ends"
        for ended in hearing.ended:
            if ended.calls:
                yield from _check_told_calls(case, hearing, ended)
            elif ended.state.state == "awaiting_approval":
                yield from _check_told_question(case, hearing, ended)
            elif ended.error is None and (case.row["state"] != "succeeded" or hearing.text != answer):
                yield f"a caller was told {hearing.text!r}; the journal says {case.row['state']} {answer!r}"
            if ended.error is not None and case.calm:
                yield f"nothing went wrong, and a caller was told {ended.error!r}"
        if hearing.text and not any(call.text.startswith(hearing.text) for call in case.received):
            yield f"a caller was told {hearing.text!r}, which no single call said"


def it_is_told_again(case: Case) -> Iterator[str]:
    """Whoever asks when all is over hears the whole answer, or what went wrong (N-6); nothing of what was erased."""
    recall = case.world.recalls.get(case.run)
    if case.erased and recall is not None:
        if recall.text or not (recall.ended or recall.refused):
            yield f"its content was erased, and in the end a caller was told {recall.text!r}"
    elif recall is None or not recall.ended:
        yield "nobody could be told of it in the end"
    elif (recall.ended[0].error is None) != (case.row["state"] == "succeeded"):
        yield f"in the end a caller was told {recall.ended[0].error!r}, and the run is {case.row['state']}"


def a_wish_is_heard(case: Case) -> Iterator[str]:
    """A run whose end was requested ends as soon as nothing is broken any more."""
    wishes = [fact.at for fact in case.facts if fact.kind == "run.cancel_asked"]
    if wishes and case.end is not None:
        waited = case.end.at - max(wishes[0], case.broken_until)
        if waited > case.patience:
            yield f"it went on for {waited:.1f} s after it was cancelled"


def nobody_is_called_after_a_cancelled_wait(case: Case) -> Iterator[str]:
    """Results that come once the end was asked for are journaled; no worker is called for them, nor a conductor."""
    is_cancelled = resumed = False
    for fact in case.facts:
        is_cancelled = is_cancelled or fact.kind == "run.cancel_asked"
        resumed = resumed or (is_cancelled and fact.kind == "run.resumed")
        if resumed and fact.kind == "call.intended":
            yield f"event {fact.seq} intends a call in a turn that began after its end was asked for"


def no_run_is_forgotten(case: Case) -> Iterator[str]:
    """No run waits for its deadline while there is nothing that keeps it, unless workers are to blame."""
    end = case.end
    blameless = ("store.", "queue.", "caller.", "receiver.", "approver.")
    if end is None or end.kind != "run.expired" or not case.only(*blameless, *HARM):
        return
    if end.body["error"] in (ABANDONED, approved.NOBODY_DECIDED):
        return
    before = [fact for fact in case.facts if fact.seq < end.seq and fact.kind not in LAST_WORDS]
    opened = {fact.body["call"] for fact in before if fact.kind == "call.intended"}
    opened -= {fact.body["call"] for fact in before if fact.kind == "call.finished"}
    idle = end.at - max(before[-1].at, case.world.healed)
    if not opened and idle > case.patience:
        yield f"nothing happened in the last {idle:.1f} s before it expired"


def an_outcome_is_lost_only_with_its_process(case: Case) -> Iterator[str]:
    """While only the database is away, or the queue, what is known of a call is kept until it can be written, unless
    the process has to stop meanwhile."""
    if not case.only("store.outage", "queue.", *OTHERS, *HARM):
        return
    excused = case.world.harmed | (case.world.drained if case.world.faults.hits["store.outage"] else set())
    authors = {fact.body["call"]: fact.author for fact in case.facts if fact.kind == "call.intended"}
    for call, outcome in case.outcomes.items():
        if outcome["outcome"] == "unknown" and authors.get(call) not in excused:
            yield f"{call} is unknown, and nothing ever happened to {authors.get(call)}"


def gateways_write_what_callers_say(case: Case) -> Iterator[str]:
    """An admission, a next turn, a wish to cancel, a decision on a plan, and the end that follows from a refusal: a
    process that is no engine writes nothing else of a run."""
    gateways = {process.name for process in case.world.processes if not process.dispatcher}
    allowed = ("run.admitted", "run.resumed", "step.tool_results", "run.cancel_asked", "run.approved", "run.refused")
    refused_by = ""
    for fact in case.facts:
        refused_by = fact.author if fact.kind == "run.refused" else refused_by
        follows = fact.author == refused_by and (fact.kind in ENDINGS or fact.kind == "step.skipped")
        if fact.author in gateways and fact.kind not in allowed and not follows:
            yield f"{fact.author} is a gateway, and wrote {fact.kind}"


def what_is_given_up_is_taken_up(case: Case) -> Iterator[str]:
    """At once, where a dispatcher is there that is about to stay."""
    world = case.world
    if not case.only(*OTHERS, "process.drained"):
        return
    there = [process.since for process in world.processes if process.dispatcher and process.name not in world.drained]
    for gift in world.witness.gifts:
        taken_up = min(gift.taken_at, case.end.at if case.end is not None else gift.taken_at)
        if gift.run == case.run and taken_up - gift.at > CALLED and any(since < gift.at - CALLED for since in there):
            yield f"{gift.giver} gave it up at {gift.at:.1f} s, and it was taken up at {taken_up:.1f} s"


def who_stops_leaves_nothing_behind(case: Case) -> Iterator[str]:
    if case.only(*OTHERS, "process.drained"):
        yield from (f"{process} has stopped and {what} it" for process, what, run in case.world.left if run == case.run)


def _check_told_calls(case: Case, hearing: CallerConnection, ended: TurnEnd) -> Iterator[str]:
    """A turn that ended with calls of the caller's tools is told as it was journaled."""
    ids = [call.id for call in ended.calls]
    turns: list[list[dict[str, Any]]] = []
    latest: dict[int, dict[str, Any]] = {}
    for fact in case.facts:
        if fact.kind == "step.awaiting_tool":
            latest[fact.body["n"]] = fact.body
        elif fact.kind == "run.awaiting_tool":
            turns.append([latest[n] for n in fact.body["steps"]])
    usages = []
    for bodies in turns:
        calls = [call["id"] for body in bodies for call in body["calls"]]
        if sorted(ids) == sorted(calls):
            usages.append(bodies)
    if len(usages) != 1:
        yield f"a caller was told of calls {ids}, which no turn ended with"
    elif hearing.text and not any(
        json.dumps(hearing.text)[1:-1] in case.texts.get(call["said"], "") for call in usages[0]
    ):
        yield f"a caller was told {hearing.text!r} with its calls, which no step said"


def _check_told_question(case: Case, hearing: CallerConnection, ended: TurnEnd) -> Iterator[str]:
    """A caller whose plan waits for an approval is told of the plan that was journaled. The text of an answer may have
    come by then, if it is the plan inside of a step that waits."""
    question = ended.state.approval_question
    digests = [body["digest"] for body in case.bodies("run.awaiting_approval")]
    if question is None or question.digest not in digests or ended.error is not None:
        yield f"a caller was told {hearing.text!r} {ended.error!r} and of a plan that waits; {len(digests)} waited"


def results_go_where_they_were_wanted(case: Case) -> Iterator[str]:
    """Each step gets what came for its own calls, once; and turns alternate with waits."""
    expected: dict[int, list[str]] = {}
    turns, waits = 0, False
    for fact in case.facts:
        body = fact.body
        if fact.kind == "step.awaiting_tool":
            expected[body["n"]] = [call["id"] for call in body["calls"]]
        elif fact.kind == "step.tool_results":
            ids = expected.pop(body["n"], [])
            came = set(TOKEN.findall(case.texts.get(body["results"], "")))
            true = {token for id_ in ids for token in TOKEN.findall(case.world.results.get(id_, ""))}
            if ids != body["ids"] or (came != true and not (case.erased and body["results"] not in case.texts)):
                yield f"step {body['n']} wanted results of {ids} and got {sorted(came)} for {body['ids']}"
        elif fact.kind in ("run.awaiting_tool", "run.resumed"):
            turns += fact.kind == "run.resumed"
            if waits is (fact.kind == "run.awaiting_tool") or body["turn"] != turns:
                yield f"{fact.kind} in turn {turns}"
            waits = not waits


def an_abandoned_wait_expires(case: Case) -> Iterator[str]:
    """A run whose caller never comes back ends soon after the wait is over, and not before."""
    waits = [fact.body["until"] - EPOCH for fact in case.facts if fact.kind == "run.awaiting_tool"]
    if case.end is None or case.end.body.get("error") != ABANDONED or not waits:
        return
    if any(site.startswith("process.clock") for site in case.world.faults.hits):
        return
    late = case.end.at - max(waits[-1], case.broken_until)
    if case.end.at < waits[-1] - 1.0 or late > case.patience:
        yield f"its wait was over at {waits[-1]:.1f} s, and it ended at {case.end.at:.1f} s"


def nothing_widens_inside(case: Case) -> Iterator[str]:
    """A nested step may see what its parent may, and steps of its own plan; and nothing is nested too deep."""
    steps = {body["n"]: body for body in case.bodies("plan.step")}
    depths: dict[int | None, int] = {None: 0}
    for n, body in sorted(steps.items()):
        parent = body.get("parent")
        depths[n] = depths[parent] + 1
        if parent is None:
            continue
        if depths[parent] > case.facts[0].body["limits"]["depth"] or steps[parent]["worker"] != OPENS:
            yield f"step {n} is nested in step {parent}, {depths[parent]} deep"
        own = {m for m, other in steps.items() if other["proposal"] == body["proposal"] and m < n}
        if wider := set(body["access"]) - own - set(steps[parent]["access"]):
            yield f"step {n} may see {sorted(map(str, wider))}, which step {parent} may not"


def the_receiver_is_told(case: Case) -> Iterator[str]:
    """The end of each turn in the background reaches the operator's receiver, in the right words."""
    if not case.world.setting.notifies:
        return
    expected: dict[str, tuple[str, float]] = {}
    name, wants = "", False
    for fact in case.facts:
        if fact.kind in ("run.admitted", "run.resumed"):
            turn = fact.body.get("turn", 0)
            name, wants = f"{case.run}_{turn}" if turn else case.run, bool(fact.body["wire"].get("background"))
        elif wants and (fact.kind in ENDINGS or fact.kind == "run.awaiting_tool"):
            expected[f"resp_{name}"], wants = (_word(fact), fact.at), False
    deliveries = [
        delivery for delivery in case.world.receiver.deliveries if delivery.about.startswith(f"resp_{case.run}")
    ]
    for response, (word, at) in expected.items():
        came = [delivery for delivery in deliveries if delivery.about == response]
        if not any(delivery.is_accepted for delivery in came):
            yield f"the end of {response} was told {len(came)} times, and never taken"
        if wrong := [delivery for delivery in came if delivery.kind != f"response.{word}" or delivery.at < at]:
            yield f"{response} is {word} since {at:.2f} s, and {wrong[0].kind} was told at {wrong[0].at:.2f} s"
    if unknown := {delivery.about for delivery in deliveries} - expected.keys():
        yield f"{sorted(unknown)} was told, and nobody wanted that"


def _word(fact: Fact) -> str:
    if fact.kind == "run.succeeded":
        return "incomplete" if fact.body.get("finish") in ("length", "content_filter") else "completed"
    return {"run.awaiting_tool": "completed", "run.cancelled": "cancelled"}.get(fact.kind, "failed")


def what_is_erased_is_gone(case: Case) -> Iterator[str]:
    """Once its caller was told so, nothing of a run's words is kept, then or later; the journal never had any."""
    if not case.erased and any(
        erasure.over and not erasure.refused for erasure in case.world.erasures if erasure.run == case.run
    ):
        yield "its caller was told that it is erased, and its salt is there"
    if case.erased and case.row["contents"]:
        yield f"it is erased, and {len(case.row['contents'])} contents are there"
    for fact in case.facts if case.erased else ():
        if TOKEN.search(json.dumps(fact.body)):
            yield f"event {fact.seq} of the journal has words of its content"


def no_ticket_is_left(case: Case) -> Iterator[str]:
    if case.row["tickets"]:
        yield f"{case.row['tickets']} tickets are left"


def nothing_is_degraded_without_a_fault(case: Case) -> Iterator[str]:
    if case.calm and (case.row["state"] != "succeeded" or case.row["degraded"]):
        yield f"nothing went wrong, and it is {case.row['state']}, degraded: {bool(case.row['degraded'])}"


CHECKS: tuple[Check, ...] = (
    the_journal_has_no_gaps,
    it_ends_once,
    it_ends_in_time,
    each_intent_has_one_outcome,
    no_step_runs_after_it_is_done,
    attempts_are_counted,
    one_plan_is_made,
    the_books_balance,
    calls_are_what_was_intended,
    what_was_billed_was_counted,
    steps_see_what_is_granted,
    answers_are_the_workers,
    the_caller_is_told_the_truth,
    it_is_told_again,
    results_go_where_they_were_wanted,
    an_abandoned_wait_expires,
    nothing_widens_inside,
    the_receiver_is_told,
    what_is_erased_is_gone,
    a_wish_is_heard,
    nobody_is_called_after_a_cancelled_wait,
    no_run_is_forgotten,
    an_outcome_is_lost_only_with_its_process,
    gateways_write_what_callers_say,
    what_is_given_up_is_taken_up,
    who_stops_leaves_nothing_behind,
    no_ticket_is_left,
    nothing_is_degraded_without_a_fault,
    *approved.CHECKS,
)


def _strangers(world: World, cases: list[Case]) -> Iterator[str]:
    stored = Counter(run for (run,) in world.database.rows("SELECT run FROM events"))
    if stored != Counter({run: len(facts) for run, facts in world.witness.facts.items()}):
        yield "the events that are stored are not those that were committed"
    for visit in world.visits:
        runs = {hearing.run for hearing in visit.hearings if hearing.run}
        keys = {
            (hearing.order.once.id, hearing.run) for hearing in visit.hearings if hearing.order.once and hearing.run
        }
        if len({key for key, _ in keys}) < len(keys):
            yield f"one request with one key began {sorted(runs)}"
        for run in sorted(runs - {case.run for case in cases}):
            yield f"{run} was accepted and is not there"


def _liveness(world: World) -> Iterator[str]:
    for process in world.living():
        if process.broke is not None:
            yield f"{process.name} broke: {process.broke!r}"
        if not process.ended:
            yield f"{process.name} does not stop"
            continue
        left = [task for task in process.seam.machine.tasks if not task.done()]
        if left:
            yield f"{process.name} has stopped, and {len(left)} of its tasks have not"
    for visit in world.visits:
        for hearing in visit.hearings:
            if hearing.gave_up:
                yield f"a caller of {hearing.run} waited in vain"
