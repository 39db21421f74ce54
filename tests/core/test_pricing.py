"""The least price of a plan, the worker that answers alone, and the share of one step."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.message.chat import Form, Message, Task, Text, Tool, Toolbox
from app.core.plan.pricing import best_alone, every_plan_fits, least_price, plan_price, question_tokens
from app.core.plan.workflow import CONDUCTOR, Access, Step
from app.core.pool.catalog import Amount, Limits, Price, Worker
from app.core.pool.policy import affordable_output, input_bound, worst_case

RATES = st.integers(0, 200_000_000)
CHEAP, DEAR = Worker("cheap", "p", "cheap", Price(1_000_000, 2_000_000)), Worker("dear", "p", "d", Price(10**7, 10**8))
TASK = Task((Message("user", (Text("What is 2 + 2?"),)),))


@settings(max_examples=60, deadline=None)
@given(
    into=RATES,
    out=RATES,
    size=st.integers(0, 100_000),
    output_wanted=st.integers(1, 9_000),
    floor=st.integers(1, 9_000),
    usd=st.integers(0, 2_000_000),
    tokens=st.integers(0, 200_000),
)
def test_an_output_is_as_long_as_the_money_allows(
    into: int, out: int, size: int, output_wanted: int, floor: int, usd: int, tokens: int
) -> None:
    worker = Worker("w", "p", "m", Price(into, out))

    def fits(output: int) -> bool:
        hold = worst_case(worker, size, output)
        return hold.usd <= usd and hold.tokens <= tokens

    output = affordable_output(worker, size, output_wanted, floor=floor, left=Amount(usd, tokens))
    if output == 0:
        assert not fits(min(floor, output_wanted))
    else:
        assert min(floor, output_wanted) <= output <= output_wanted
        assert fits(output)
        assert output == output_wanted or not fits(output + 1)


def test_a_plan_costs_its_steps_at_the_floor_and_what_they_read_of_each_other() -> None:
    question = question_tokens(TASK)
    assert question == input_bound(TASK.messages)
    alone = plan_price([Step("cheap", answers=True)], [CHEAP, DEAR], question, 256)
    assert alone == least_price(CHEAP, question, 256) == Amount(question + 512, question + 256)
    twice = [Step("cheap"), Step("cheap", "Check.", Access(True, (0,)), answers=True)]
    checked = plan_price(twice, [CHEAP, DEAR], question, 256)
    assert checked.usd > 2 * alone.usd + 4 * 256, "the checker reads the answer, a byte counts as a token"
    nested = plan_price([Step(CONDUCTOR, answers=True)], [DEAR, CHEAP], question, 256)
    assert nested == alone, "as much as the cheapest worker"
    assert every_plan_fits([CHEAP], 2, question, 256, checked + checked)
    assert not every_plan_fits([CHEAP, DEAR], 2, question, 256, checked + checked)


def test_tools_and_forms_are_part_of_what_is_sent() -> None:
    plain = question_tokens(TASK)
    assert question_tokens(replace(TASK, form=Form({"type": "object"}))) > 2 * plain
    assert question_tokens(replace(TASK, toolbox=Toolbox((Tool("look_up", "Looks something up."),)))) > 2 * plain


def test_the_best_worker_that_can_be_paid_answers_alone() -> None:
    limits, question = Limits(output_tokens=1_000), question_tokens(TASK)
    small = Worker("small", "p", "s", Price(500_000, 1_000_000))

    def best(usd: int, preferred: str = "dear") -> str:
        return best_alone([DEAR, CHEAP, small], preferred, question, limits, Amount(usd, 10**6))

    assert best(10**6) == "dear"
    assert best(10**6, "small") == "small", "the tier's own fallback, where it can be paid"
    assert best(5_000) == "cheap", "the dearest whose whole answer can be paid"
    assert best(1_200) == "small"
    assert best(400) == "small", "the longest answer, where none can be paid as a whole"
    assert best(1) == "dear", "nobody can be paid"
