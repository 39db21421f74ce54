"""Money: prices are exact integers rounded up, and what is reserved covers whatever a call may report."""

from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.message.chat import NO_TOOLS, Document, Image, Message, Text, ToolCall, Usage, sum_usages
from app.core.pool.catalog import MILLION, Price, Worker
from app.core.pool.policy import (
    MOST_PAGES,
    PAGE_CHARS,
    PER_IMAGE,
    PER_MESSAGE,
    PER_PAGE,
    estimate_usage,
    input_bound,
    usage_of_broken,
    worst_case,
)

RATES = st.integers(0, 200 * MILLION)
TOKENS = st.integers(0, 2_000_000)
TALK = (Message("system", (Text("é"),)), Message("user", (Text("hello"), Image("data:x"), Text("!")), name="bob"))


@settings(max_examples=40, deadline=None)
@given(RATES, RATES, RATES, TOKENS, TOKENS, TOKENS)
def test_a_cost_is_the_exact_fraction_rounded_up(
    into: int, out: int, cached: int, fresh: int, cached_tokens: int, output_tokens: int
) -> None:
    cost = Price(into, out, cached).cost(Usage(fresh + cached_tokens, cached_tokens, output_tokens))
    exact = Fraction(fresh * into + cached_tokens * cached + output_tokens * out, MILLION)
    assert 0 <= cost - exact < 1
    assert isinstance(cost, int)


@settings(max_examples=40, deadline=None)
@given(RATES, RATES, RATES, st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_a_sum_of_costs_is_never_below_the_cost_of_the_sum(
    into: int, out: int, cached: int, calls: list[tuple[int, int]]
) -> None:
    price = Price(into, out, cached)
    usages = [Usage(input_tokens, input_tokens // 2, output_tokens) for input_tokens, output_tokens in calls]
    assert sum(map(price.cost, usages)) >= price.cost(sum_usages(usages))


@settings(max_examples=40, deadline=None)
@given(RATES, RATES, RATES, st.data())
def test_the_worst_case_covers_every_usage_within_its_bounds(
    into: int, out: int, cached: int, data: st.DataObject
) -> None:
    worker = Worker("ada", "stub", "ada", Price(into, out, cached))
    most_in, most_out = data.draw(TOKENS), data.draw(TOKENS)
    most = worst_case(worker, most_in, most_out)
    input_tokens, output_tokens = data.draw(st.integers(0, most_in)), data.draw(st.integers(0, most_out))
    usage = Usage(
        input_tokens, data.draw(st.integers(0, input_tokens)), output_tokens, data.draw(st.integers(0, output_tokens))
    )
    assert worker.price.cost(usage) <= most.usd
    assert usage.total <= most.tokens


OTHER_RATES = st.none() | RATES


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_worst_case_covers_cache_writes_reasoning_and_the_price_of_long_prompts(data: st.DataObject) -> None:
    def draw_price(**more: Any) -> Price:
        rates = [data.draw(RATES) for _ in range(3)]
        return Price(*rates, data.draw(OTHER_RATES), data.draw(OTHER_RATES), **more)

    price = draw_price(long_after=data.draw(TOKENS), long=draw_price())
    most_in, most_out = data.draw(TOKENS), data.draw(TOKENS)
    input_tokens, output_tokens = data.draw(st.integers(0, most_in)), data.draw(st.integers(0, most_out))
    cached_tokens = data.draw(st.integers(0, input_tokens))
    usage = Usage(
        input_tokens,
        cached_tokens,
        output_tokens,
        data.draw(st.integers(0, output_tokens)),
        written=data.draw(st.integers(0, input_tokens - cached_tokens)),
    )
    assert price.cost(usage) <= worst_case(Worker("ada", "stub", "ada", price), most_in, most_out).usd


def test_a_long_prompt_costs_the_price_of_long_prompts_altogether() -> None:
    price = Price(1, 2, long_after=200_000, long=Price(2, 3))
    assert price.cost(Usage(200_000, 0, 1_000_000)) == 3
    assert price.cost(Usage(200_001, 0, 1_000_000)) == 4


def test_cache_writes_and_reasoning_have_prices_of_their_own() -> None:
    price = Price(4, 10, 1, written=5, reasoning=20)
    assert price.cost(Usage(3 * MILLION, MILLION, 2 * MILLION, MILLION, written=MILLION)) == 4 + 1 + 5 + 10 + 20


def test_more_cached_than_input_costs_no_less_than_nothing() -> None:
    assert Price(MILLION, MILLION, 0).cost(Usage(5, 9, 1)) == 1


def test_the_bound_counts_bytes_names_images_and_what_the_provider_adds() -> None:
    assert input_bound(TALK, 100) == 2 + 6 + 3 + 3 * PER_MESSAGE + PER_IMAGE + 100
    assert input_bound(()) == PER_MESSAGE


def test_the_bound_counts_tool_calls_and_what_providers_want_back() -> None:
    call = Message("assistant", (), calls=(ToolCall("id", "add", "{é}"),), keepsake={"s": "x"})
    assert input_bound([call]) == 3 + 4 + PER_MESSAGE + len('{"s": "x"}') + 2 * PER_MESSAGE


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_the_bound_is_never_below_one_token_per_byte(text: str) -> None:
    assert input_bound([Message("user", (Text(text),))]) > len(text.encode())


def test_an_unreported_usage_is_estimated_and_marked() -> None:
    talk = [Message("user", (Text("x" * 68),))]
    assert estimate_usage(talk, NO_TOOLS, "12345") == Usage(input=25, output=2, estimated=True)
    assert estimate_usage(talk, NO_TOOLS, "") == Usage(input=25, output=0, estimated=True)


def test_a_broken_call_is_counted_from_above_but_not_above_what_was_reserved() -> None:
    assert usage_of_broken(50, 1000, "é" * 10, 0) == Usage(input=50, output=20 + PER_MESSAGE, estimated=True)
    assert usage_of_broken(50, 30, "x" * 100, 0).output == 30
    assert usage_of_broken(50, 1000, "", 1000).output == 1000


def test_a_pdf_is_counted_by_the_pages_that_its_size_stands_for() -> None:
    sizes = {1: 1, PAGE_CHARS // 2: 1, 3 * PAGE_CHARS: 4, 10**8: MOST_PAGES}
    for size, pages in sizes.items():
        talk = (Message("user", (Document("x" * size), Text("!"))),)
        assert input_bound(talk) == pages * PER_PAGE + 1 + 2 * PER_MESSAGE
