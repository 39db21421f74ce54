"""One suite for the conductor seam over its three implementations, and what only the model one does."""

import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from app.conductor.fixed import SHAPES, FixedConductor, RandomConductor
from app.conductor.model import ModelConductor
from app.conductor.prompt import messages, shorten, template
from app.conductor.protocol import Brief, Conductor, FixedPlanConductor, PastStep, Previous, Question
from app.conductor.styles import STYLES
from app.core.message.chat import (
    ChosenToken,
    End,
    Image,
    Message,
    Piece,
    Task,
    Text,
    TextDelta,
    Tool,
    Toolbox,
    ToolCall,
    Usage,
)
from app.core.plan.proposals import by_name, read_plan
from app.core.plan.workflow import Access, Step
from app.core.pool.catalog import Card, ConductorSpec, Limits, Price, Worker
from app.errors import PlanRejected, WorkerUnavailable

NAMES = ("ada-large", "bob-mini", "cyd-vision")
WORKERS = tuple(
    Worker(name, "stub", f"{name}-2026", Price(1_000_000, 2_500_000), Card(strengths=("code",), speed=80.0))
    for name in NAMES
)
TASK = Task(
    (
        Message("system", (Text("Be brief."),)),
        Message("user", (Text("What is this?"), Image("data:image/png;base64,AA"))),
    )
)
BRIEF = Brief(TASK, WORKERS, Limits(), usd_left=123_400)


@dataclass
class ScriptedAsk:
    """A scripted `ask`: gives the pieces, then raises, and remembers how it was called."""

    reads: Sequence[list[Piece]] = ()
    error: Exception | None = None
    questions: list[Question] = field(default_factory=list)

    async def __call__(self, question: Question) -> AsyncGenerator[list[Piece], None]:
        self.questions.append(question)
        for pieces in self.reads:
            yield pieces
        if self.error is not None:
            raise self.error


def plan_of(*steps: tuple[int, list[str | int]]) -> str:
    """A plan's text."""
    return json.dumps({"steps": [{"worker": n, "subtask": f"Do {n}.", "access": access} for n, access in steps]})


def saying(*texts: str, error: Exception | None = None) -> ScriptedAsk:
    """A model that says this, one read for each text."""
    return ScriptedAsk([*([TextDelta(text)] for text in texts), [End("stop", Usage(9, 0, 9))]], error)


def schema_of(question: Question) -> Mapping[str, Any]:
    """The schema of the answer, which a plan always has."""
    assert question.schema is not None
    return question.schema


def chain(steps: int) -> str:
    """A plan of so many steps, each seeing all before it."""
    return plan_of(*[(place % len(NAMES), ["user", *range(place)]) for place in range(steps)])


def model(*, positional: bool = True, logprobs: bool = True) -> ModelConductor:
    """The model conductor."""
    return ModelConductor("planner", STYLES["general"], positional=positional, logprobs=logprobs, temperature=0.7)


def plan_of_most_steps(limits: Limits) -> FixedPlanConductor:
    """A caller's plan as long as the limit."""
    steps = [Step(NAMES[0], "x", Access(True, tuple(range(place)))) for place in range(limits.steps)]
    return FixedPlanConductor((*steps[:-1], replace(steps[-1], answers=True)))


async def propose_all_steps(conductor: Conductor, brief: Brief, ask: ScriptedAsk) -> list[Step]:
    """All steps."""
    return [step async for step in conductor.propose(brief, ask)]


MAKERS: dict[str, Callable[[Limits], Conductor]] = {
    "model": lambda _limits: model(),
    "given": plan_of_most_steps,
    **{shape: lambda _limits, shape=shape: FixedConductor(ConductorSpec("fixed", shape=shape)) for shape in SHAPES},  # type: ignore[misc]
}


@pytest.fixture(params=sorted(MAKERS))
def maker(request: pytest.FixtureRequest) -> Callable[[Limits], Conductor]:
    """Makes each conductor in turn."""
    return MAKERS[request.param]


# -- what every conductor promises


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_a_workflow_keeps_to_the_limits(maker: Callable[[Limits], Conductor], most: int, workers: int) -> None:
    limits = Limits(steps=most)
    brief = replace(BRIEF, limits=limits, workers=WORKERS[:workers])
    plan = plan_of(*[(place % workers, ["user", *range(place)]) for place in range(most)])
    steps = await propose_all_steps(maker(limits), brief, saying(plan))
    assert 1 <= len(steps) <= most
    assert [step.answers for step in steps] == [False] * (len(steps) - 1) + [True]
    assert {step.worker for step in steps} <= set(NAMES[:workers])
    assert all(n < place for place, step in enumerate(steps) for n in step.access.steps)
    assert all(step.subtask or step.access.user for step in steps)
    assert steps[-1].access.steps == tuple(range(len(steps) - 1)), "the answer sees what was done for it"


async def test_only_a_conductor_that_waits_asks_and_only_once(maker: Callable[[Limits], Conductor]) -> None:
    conductor, ask = maker(Limits()), saying(chain(3))
    await propose_all_steps(conductor, BRIEF, ask)
    assert len(ask.questions) == (0 if conductor.instant else 1)


async def test_no_state_is_kept_between_proposals(maker: Callable[[Limits], Conductor]) -> None:
    conductor = maker(Limits())
    first = await propose_all_steps(conductor, BRIEF, saying(chain(2)))
    assert await propose_all_steps(conductor, BRIEF, saying(chain(2))) == first


async def test_a_random_plan_is_valid_and_the_runs_own() -> None:
    def brief(run: int, steps: int) -> Brief:
        return replace(BRIEF, run=f"run_{run}", limits=Limits(steps=steps))

    def as_plan(steps: Sequence[Step]) -> dict[str, Any]:
        written = [{"worker": s.worker, "subtask": s.subtask, "access": s.access.as_list()} for s in steps]
        return {"steps": written}

    plans = [await propose_all_steps(RandomConductor(), brief(run, 5), saying()) for run in range(200)]
    for steps in plans:
        assert read_plan(as_plan(steps), by_name(NAMES), 5)
        assert [step.answers for step in steps] == [False] * (len(steps) - 1) + [True]
    assert {len(steps) for steps in plans} == {1, 2, 3, 4, 5}
    assert {step.worker for steps in plans for step in steps} == set(NAMES)
    assert not all(step.access.user for steps in plans for step in steps)
    assert await propose_all_steps(RandomConductor(), brief(7, 5), saying()) == plans[7]
    assert len(await propose_all_steps(RandomConductor(), brief(7, 1), saying())) == 1
    assert await propose_all_steps(RandomConductor(), replace(BRIEF, round=2), saying()) == []


# -- fixed


@pytest.mark.parametrize(
    ("shape", "steps", "expected_access"),
    [
        ("single", 5, [()]),
        ("chain", 5, [(), (0,), (0, 1)]),
        ("chain", 2, [(), (0,)]),
        ("chain", 1, [()]),
        ("fan_out", 5, [(), (), (), (0, 1, 2)]),
        ("fan_out", 2, [(), (0,)]),
        ("fan_out", 1, [()]),
        ("self_consistency", 3, [(), (), (0, 1)]),
    ],
)
async def test_a_shape_is_cut_to_the_limit(shape: Any, steps: int, expected_access: list[tuple[int, ...]]) -> None:
    conductor = FixedConductor(ConductorSpec("fixed", shape=shape, workers=("bob-mini", "gone")))
    proposed_steps = await propose_all_steps(conductor, replace(BRIEF, limits=Limits(steps=steps)), saying())
    assert [step.access.steps for step in proposed_steps] == expected_access
    assert {step.worker for step in proposed_steps} == {"bob-mini"}, "preferred workers that are eligible"


async def test_shapes_spread_over_workers_and_one_asks_itself() -> None:
    spread = await propose_all_steps(FixedConductor(ConductorSpec("fixed", shape="fan_out")), BRIEF, saying())
    assert [step.worker for step in spread] == [*NAMES, NAMES[0]]
    alone = await propose_all_steps(FixedConductor(ConductorSpec("fixed", shape="self_consistency")), BRIEF, saying())
    assert {step.worker for step in alone} == {NAMES[0]}
    assert [
        step.subtask for step in await propose_all_steps(FixedConductor(ConductorSpec("fixed")), BRIEF, saying())
    ] == [""]


async def test_a_fixed_conductor_takes_the_answer_or_has_it_checked_by_the_next() -> None:
    spec = ConductorSpec("fixed", workers=NAMES[:2])
    further = replace(BRIEF, round=2)
    assert await propose_all_steps(FixedConductor(spec), further, saying()) == []
    checks = FixedConductor(replace(spec, again=True))
    for number, worker in ((2, NAMES[1]), (3, NAMES[0])):
        [step] = await propose_all_steps(checks, replace(further, round=number), saying())
        assert (step.worker, step.access, step.answers) == (worker, Access(True, (), previous=True), True)
    assert len(await propose_all_steps(checks, BRIEF, saying())) == 1


# -- further rounds of a model


PAST = (PastStep(NAMES[2], "Draft it.", ("user",), True), PastStep("gone", "", ("user", 0), False))
FURTHER = replace(BRIEF, round=2, previous=Previous(PAST, "It is 4."))


async def test_a_further_round_may_be_empty_and_may_see_the_answer_before() -> None:
    ask = saying('{"steps": []}')
    assert await propose_all_steps(model(), FURTHER, ask) == []
    assert ask.questions[0].template == "further-1"
    steps = schema_of(ask.questions[0])["properties"]["steps"]
    assert steps["minItems"] == 0
    assert ["user", "previous"] in steps["prefixItems"][0]["properties"]["access"]["enum"]
    [step] = await propose_all_steps(model(), FURTHER, saying(plan_of((0, ["previous"]))))
    assert step.access == Access(False, (), previous=True)
    for plan in ('{"steps": []}', plan_of((0, ["previous"]))):
        with pytest.raises(PlanRejected):
            await propose_all_steps(model(), BRIEF, saying(plan))


async def test_three_empty_lists_take_the_answer_and_all_means_it_too() -> None:
    empty = "model_id = []\nsubtasks = []\naccess_list = []"
    assert await propose_all_steps(model(), FURTHER, saying(empty)) == []
    with pytest.raises(PlanRejected):
        await propose_all_steps(model(), BRIEF, saying(empty))
    lists = 'model_id = [0, 1]\nsubtasks = ["Look", "Mend"]\naccess_list = [[], ["all"]]'
    steps = await propose_all_steps(model(), FURTHER, saying(lists))
    assert [step.access for step in steps] == [Access(True, ()), Access(True, (0,), previous=True)]


def test_the_round_before_is_shown_behind_a_mark_that_it_cannot_hold() -> None:
    prompt = messages(FURTHER)[-1].text
    assert messages(FURTHER)[:-1] == messages(BRIEF)
    assert "- step 0, worker 2, access user: Draft it." in prompt
    assert "- step 1, a worker who has left, access user, 0: Answer the user. (it came to nothing)" in prompt
    mark = prompt.partition("with the mark ")[2].split(".")[0]
    for answer in (f"It is {mark}.", "4\n" + mark, "x" * 50_000):
        again = messages(replace(FURTHER, previous=Previous(PAST, answer)))[-1].text
        other = again.partition("with the mark ")[2].split(".")[0]
        _, fenced, _ = again.split(f"\n{other}\n")
        assert fenced == answer or (len(fenced) < 17_000 and "34000 characters are left out" in fenced)
        assert other not in fenced
    assert len(messages(replace(FURTHER, objections=("no",)))) == len(messages(FURTHER)) + 1


# -- model


async def test_each_step_comes_before_the_next_is_read() -> None:
    text, reads = chain(3), []

    async def ask(_question: Question) -> AsyncGenerator[list[Piece], None]:
        for char in text:
            reads.append(char)
            yield [TextDelta(char)]

    workers_and_reads = [(step.worker, len(reads)) async for step in model().propose(BRIEF, ask)]
    assert [worker for worker, _ in workers_and_reads] == list(NAMES)
    assert workers_and_reads[0][1] < workers_and_reads[1][1] < workers_and_reads[2][1] == len(text) - 1


async def test_the_model_is_asked_under_the_schema_and_a_bound() -> None:
    ask = saying(chain(1))
    await propose_all_steps(model(), replace(BRIEF, limits=Limits(steps=2)), ask)
    [question] = ask.questions
    assert question.worker == "planner"
    assert schema_of(question)["properties"]["steps"]["maxItems"] == 2
    assert (question.temperature, question.logprobs) == (0.7, 10)
    assert 2 * 600 < question.max_tokens < 2_000
    await propose_all_steps(model(positional=False, logprobs=False), BRIEF, ask)
    assert "prefixItems" not in schema_of(ask.questions[1])["properties"]["steps"]
    assert ask.questions[1].logprobs == 0


async def test_garbage_is_rejected_with_all_reasons() -> None:
    text = plan_of((7, ["user"]), (0, [3]), (1, ["user"]))
    with pytest.raises(PlanRejected) as caught:
        await propose_all_steps(model(), BRIEF, saying(text[:40], text[40:]))
    assert [reason[:6] for reason in caught.value.reasons] == ["step 0", "step 1"]
    for garbage in ("", "I would rather not.", chain(2)[:-20], "\x00" * 99):
        with pytest.raises(PlanRejected):
            await propose_all_steps(model(), BRIEF, saying(garbage))


async def test_a_fault_of_the_model_passes_through_as_it_is() -> None:
    fault = WorkerUnavailable()
    with pytest.raises(WorkerUnavailable) as caught:
        await propose_all_steps(model(), BRIEF, saying(chain(2)[:30], error=fault))
    assert caught.value is fault


async def test_the_published_three_lists_are_read() -> None:
    text = 'First one, then another.\nmodel_id = [2, 0]\nsubtasks = ["Plan", "Solve"]\naccess_list = [[], ["all"]]'
    steps = await propose_all_steps(model(), BRIEF, saying(*text))
    assert [(step.worker, step.access.steps, step.answers) for step in steps] == [
        (NAMES[2], (), False),
        (NAMES[0], (0,), True),
    ]


# -- probabilities


def decode_tokens(*tokens: tuple[str, float]) -> list[list[Piece]]:
    """One read for each token, its text and its log-probability together."""
    return [[TextDelta(token), ChosenToken(token, math.log(chance))] for token, chance in tokens]


async def test_a_choice_is_as_likely_as_all_tokens_of_its_digits() -> None:
    many = replace(BRIEF, workers=tuple(replace(WORKERS[0], name=f"w{n}") for n in range(120)))
    reads = decode_tokens(
        ('{"steps": [{"worker"', 0.9),
        (": ", 0.9),
        ("1", 0.5),
        ("1", 0.25),
        ("7", 0.8),
        (', "subtask": "Do worker 3: 5.', 0.1),
        ('", "access": ["user"]}', 0.9),
        (', {"worker": 4', 0.3),
        (', "subtask": "x", "access": [0', 0.9),
        ("]}]}", 0.9),
    )
    steps = await propose_all_steps(model(), many, ScriptedAsk(reads))
    assert [(step.worker, step.probability) for step in steps] == [("w117", 0.1), ("w4", 0.3)]


async def test_one_read_may_hold_the_whole_plan() -> None:
    tokens = [('{"steps": [{"worker": ', 1.0), ("2", 0.5), (', "subtask": "x", "access": ["user"]}]}', 1.0)]
    whole = [piece for batch in decode_tokens(*tokens) for piece in batch]
    [step] = await propose_all_steps(model(), BRIEF, ScriptedAsk([whole]))
    assert (step.worker, step.probability) == (NAMES[2], 0.5)


async def test_a_plan_that_the_model_has_only_thought_of_says_nothing_of_its_choice() -> None:
    """Servers leave the thoughts out of the text, but not out of the tokens that they list."""
    thought = '<think>{"steps": [{"worker": 2, "subtask": "x", "access": ["user"]}]} is dearer than 0.</think>'
    reads: list[list[Piece]] = [[ChosenToken(thought, math.log(0.9))]]
    reads += decode_tokens(
        ('{"steps": [{"worker": ', 1.0),
        ("2", 0.5),
        (', "subtask": "x", "access": ["user"]}, {"worker": ', 1.0),
        ("0", 0.25),
        (', "subtask": "y", "access": [0]}]}', 1.0),
    )
    steps = await propose_all_steps(model(), BRIEF, ScriptedAsk(reads))
    assert [(step.worker, step.probability) for step in steps] == [(NAMES[2], 0.5), (NAMES[0], 0.25)]


async def test_without_logprobs_no_probability_is_claimed() -> None:
    assert [step.probability for step in await propose_all_steps(model(), BRIEF, saying(chain(2)))] == [None, None]


# -- the prompt


def test_workers_are_ordinals_with_cards_and_without_names() -> None:
    system, user = messages(BRIEF)
    text = system.text + user.text
    assert not any(word in text for worker in WORKERS for word in (worker.name, worker.model, worker.provider))
    assert "Worker 2: strengths: code; price per million tokens: $1 in, $2.5 out" in system.text
    assert "speed: 80 tokens/s" in system.text
    assert "1 to 5 steps" in " ".join(system.text.split())
    assert "Budget left: $0.1234." in user.text
    slow = replace(BRIEF, workers=(replace(WORKERS[0], card=Card()),))
    assert "strengths: general" in messages(slow)[0].text
    assert "tokens/s" not in messages(slow)[0].text


def test_the_conversation_stands_between_question_lines() -> None:
    question = messages(BRIEF)[1].text.partition("<question>\n")[2].partition("\n</question>")[0]
    assert question == "system: Be brief.\n\nuser: What is this? [1 image(s) attached]"
    assert "data:image" not in messages(BRIEF)[1].text


def test_offered_tools_are_shown_and_so_are_the_calls_of_the_conversation() -> None:
    called = Message("assistant", (), calls=(ToolCall("c", "look", '{"at":1}'),))
    talk = (*BRIEF.task.messages, called, Message("tool", (Text("found"),), call_id="c"))
    box = Toolbox((Tool("look", "Looks somewhere." * 30), Tool("mute")))
    system, user = messages(replace(BRIEF, task=replace(BRIEF.task, messages=talk, toolbox=box)))
    assert "- look: Looks somewhere." in system.text
    assert len(system.text) < len(messages(BRIEF)[0].text) + 1_000
    assert "- mute: no description" in system.text
    assert '"tools": true' in system.text
    assert 'assistant:  [calls look({"at":1})]\n\ntool: found' in user.text
    assert "tools" not in messages(BRIEF)[0].text


async def test_with_tools_each_step_of_the_schema_says_whether_it_may_call_them() -> None:
    tooled = replace(BRIEF, task=replace(BRIEF.task, toolbox=Toolbox((Tool("look"),))))
    for brief, there in ((BRIEF, False), (tooled, True)):
        asker = saying(chain(1))
        await propose_all_steps(model(), brief, asker)
        place = schema_of(asker.questions[0])["properties"]["steps"]["prefixItems"][0]
        assert ("tools" in place["properties"]) is there


def test_the_repair_has_every_objection_and_what_was_rejected() -> None:
    objections = tuple(f"reason {n}" for n in range(20))
    prompt = messages(replace(BRIEF, objections=objections, rejected="the old plan"))
    assert prompt[:2] == messages(BRIEF)
    assert all(f"- {reason}\n" in prompt[2].text for reason in objections)
    assert "the old plan" in prompt[2].text
    assert "(nothing)" in messages(replace(BRIEF, objections=("no plan",)))[2].text


# -- long messages

LONG = "Sum this up.\n" + "".join(f"## Part {n}\n{'x' * 90}\n" for n in range(40)) + "Thank you."


def test_of_a_long_message_a_conductor_is_shown_both_ends_and_the_outline() -> None:
    middle = LONG[500:-250]
    prompt = shorten(LONG, 1_000)
    headings = "\n".join(f"## Part {n}" for n in range(5, 38, 2))
    lines = middle.count("\n") + 1
    note = f"[{len(middle)} characters are left out here, in {lines} lines; of their headings:\n{headings}]"
    assert prompt == f"{LONG[:500]}\n{note}\n{LONG[-250:]}"
    plain = "y" * 5_000
    assert shorten(plain, 1_000) == f"{plain[:500]}\n[4250 characters are left out here, in 1 lines]\n{plain[:250]}"


def test_a_message_that_is_not_too_long_is_shown_whole_under_the_same_name() -> None:
    assert shorten(LONG, len(LONG)) == shorten(LONG, 0) == LONG
    brief = replace(BRIEF, task=Task((Message("user", (Text(LONG),)),)))
    assert template(replace(brief, message_chars=len(LONG))) == template(brief) == "plan-1"
    assert template(replace(brief, message_chars=len(LONG) - 1)) == "plan-1-parts"
    assert LONG in messages(replace(brief, message_chars=len(LONG)))[1].text
    assert shorten(LONG, 1_000) in messages(replace(brief, message_chars=1_000))[1].text
