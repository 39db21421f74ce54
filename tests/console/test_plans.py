"""Plans in the console: previewed, edited by revisions, compared, and run as they were shown."""

import time
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from app.console.plan_form import differences
from app.process.wiring import Runtime
from tests.harness.console import SAME_ORIGIN, page_text
from tests.harness.in_process import ANSWERS, plan_text, script_answers, script_plans
from tests.harness.playground import HOSTILE, live_stream, section, submit_form, visiting
from tests.stubs import ProviderStub


@pytest.fixture
async def browser(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(runtime) as client:
        yield client


async def preview_plan(stub: ProviderStub, client: httpx.AsyncClient, *steps: tuple[Any, str, list[Any]]) -> httpx.URL:
    """The address of a plan that the playground has previewed."""
    script_answers(stub)
    script_plans(stub, plan_text(*(steps or ((0, "Think.", ["user"]), (1, "Answer.", ["user", 0])))))
    reply = await submit_form(client, "preview", tier="baton-ultra")
    assert reply.status_code == 303, page_text(reply.text)
    assert reply.headers["location"].startswith("/console/plans/plan_run_")
    return httpx.URL(reply.headers["location"])


async def get_page(client: httpx.AsyncClient, path: httpx.URL | str) -> str:
    """A page as its HTML."""
    reply = await client.get(path)
    assert reply.status_code == 200, page_text(reply.text)
    return reply.text


def form_of(html: str) -> dict[str, Any]:
    """The fields of a plan's form as a browser would send them unchanged."""
    page = Fields()
    page.feed(html)
    return page.found


class Fields(HTMLParser):
    """Reads the fields of the form that names a revision."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self._select = self._area = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        name = attributes.get("name", "")
        if tag == "textarea":
            self._area = name
            self.found[name] = ""
        elif tag == "select":
            self._select = name
        elif tag == "option" and "selected" in attributes:
            self.found[self._select] = attributes["value"]
        elif tag == "input" and attributes.get("type") == "hidden":
            self.found[name] = attributes["value"]
        elif tag == "input" and attributes.get("type") == "checkbox" and "checked" in attributes:
            self.found.setdefault(name, []).append(attributes["value"])

    def handle_endtag(self, tag: str) -> None:
        self._area = "" if tag == "textarea" else self._area

    def handle_data(self, data: str) -> None:
        if self._area:
            self.found[self._area] += data.removeprefix("\n")


async def press_button(
    client: httpx.AsyncClient, path: httpx.URL, html: str, action: str, **fields: Any
) -> httpx.Response:
    """Press a button of a plan's form after these fields were changed; underscores of names stand for hyphens."""
    changed = {name.replace("_", "-"): value for name, value in fields.items()}
    return await client.post(path, data=form_of(html) | changed | {"action": action}, headers=SAME_ORIGIN)


async def edit_plan(client: httpx.AsyncClient, path: httpx.URL, action: str, **fields: Any) -> str:
    """The page of the revision that a button has made."""
    reply = await press_button(client, path, await get_page(client, path), action, **fields)
    assert reply.status_code == 303, page_text(reply.text)
    return await get_page(client, reply.headers["location"])


@pytest.mark.long
async def test_a_preview_shows_what_would_be_done_and_who_would_see_it(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    path = await preview_plan(stub, browser, (0, "Think <b>hard</b>.", ["user"]), (1, "Answer.", [0]))
    page = await get_page(browser, path)
    text = page_text(page)
    assert "Think &lt;b&gt;hard&lt;/b&gt;." in page
    for fact in ("Likely cost and time", "at worst $", "Granted the conversation", "Granted step 0"):
        assert fact in text
    assert "Withheld the conversation (not listed)" in text
    assert "was shown the request" in text
    assert not stub.requests_for("alpha"), "nothing was executed"
    assert str(path).rpartition("/")[2] in (await get_page(browser, "/console/plans"))


@pytest.mark.long
async def test_each_edit_is_a_revision_and_the_last_one_is_run(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    path = await preview_plan(stub, browser)
    second = await edit_plan(browser, path, "save", subtask_0="Think twice.", worker_0="alpha", worker_1="gamma")
    assert "Plan, revision 2" in second
    assert "<ins>Think twice.</ins>" in second
    third = await edit_plan(
        browser, path, "add", subtask_new="Look it up.", worker_new="alpha", place_new="1", access_new=["user", "0"]
    )
    assert "Step 1 (alpha) is new." in page_text(third)
    assert "Step 2, which was step 1" in page_text(third)
    fourth = await edit_plan(browser, path, "up:1", access_1=["user"])
    assert form_of(fourth)["subtask-0"] == "Look it up."
    fifth = await edit_plan(browser, path, "remove:0")
    assert [form_of(fifth)[f"subtask-{n}"] for n in range(2)] == ["Think twice.", "Answer."]
    ran = await press_button(browser, path, fifth, "run")
    run = ran.headers["location"].rpartition("/")[2]
    live = await live_stream(browser, run)
    assert "Think twice." in section(live, "steps")
    assert ANSWERS["gamma"] in section(live, "answer")
    assert len(stub.requests_for("gamma")) == 1


@pytest.mark.long
async def test_changes_are_a_revision_before_they_are_run(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    path = await preview_plan(stub, browser)
    page = await edit_plan(browser, path, "run", subtask_0="Think twice.")
    assert "Your changes are revision 2, which has not run yet" in page_text(page)
    assert not stub.requests_for("alpha") + stub.requests_for("beta") + stub.requests_for("gamma")


@pytest.mark.long
async def test_an_edit_that_cannot_be_made_is_refused_beside_its_field(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    path = await preview_plan(stub, browser)
    page = await get_page(browser, path)
    for action, fields, field in (
        ("up:1", {}, "access-1"),
        ("save", {"worker_1": "nobody"}, "worker-1"),
        ("save", {"access_0": ["user", "1"]}, "access-0"),
        ("add", {}, "subtask-new"),
        ("add", {"subtask_new": "Look.", "place_new": "0", "access_new": ["1"]}, "access-new"),
        ("add", {"subtask_new": "Look.", "place_new": "0", "worker_new": "nobody"}, "worker-new"),
    ):
        refused = await press_button(browser, path, page, action, subtask_1=HOSTILE, **fields)
        assert refused.status_code == 400
        assert f'id="{field}-fault"' in refused.text, (action, fields)
        assert form_of(refused.text)["subtask-1"] == HOSTILE, "what was written is kept"
        assert "<svg" not in refused.text
    forged = await press_button(browser, path, page, "save", access_0=["user", "9" * 30])
    assert (forged.status_code, 'role="alert"' in forged.text) == (400, True)
    assert "Nothing was changed" in page_text((await press_button(browser, path, page, "save")).text)
    assert "Plan, revision 1<" in await get_page(browser, path)
    await edit_plan(browser, path, "save", subtask_0="Think twice.")
    late = await press_button(browser, path, page, "save", subtask_0="Think thrice.")
    assert (late.status_code, "Open the latest revision" in late.text) == (409, True)


def test_steps_are_compared_wherever_they_stand() -> None:
    before = [step("a", "Think.", "user"), step("b", "Check it.", "user", 0), step("c", "Answer.", 1)]
    after = [step("b", "Check it.", "user"), step("a", "Think.", "user"), step("c", "Answer now.", 0)]
    by_pair = {(difference.before, difference.after): difference for difference in differences(before, after)}
    assert set(by_pair) == {(1, 0), (0, 1), (2, 2)}
    assert by_pair[1, 0].changes == (("shown", "the conversation, step 0", "the conversation"),)
    assert [piece.kind for piece in by_pair[2, 2].instruction] == ["gone", "new"]
    assert not by_pair[2, 2].changes, "it is shown the same step, which has another number now"
    assert differences(before, before) == []
    edited = [before[0] | {"subtask": "Think twice."}, *before[1:]]
    assert [(difference.before, difference.after) for difference in differences(before, edited)] == [(0, 0)]
    longer = [*before[:1], step("a", "Look.", "user"), step("b", "Check it.", "user", 0), step("c", "Answer.", 2)]
    assert [(difference.before, difference.after) for difference in differences(before, longer)] == [
        (None, 1),
        (1, 2),
        (2, 3),
    ]
    assert [(difference.before, difference.after) for difference in differences(before, before[:2])] == [(2, None)]


def step(worker: str, subtask: str, *access: str | int) -> dict[str, Any]:
    return {"worker": worker, "subtask": subtask, "access": list(access)}


def test_long_instructions_are_compared_in_a_moment() -> None:
    before, after = ({"worker": "alpha", "subtask": f"a {last} " * 500, "access": ["user"]} for last in "bc")
    begin = time.process_time()
    (difference,) = differences([before], [after])
    assert time.process_time() - begin < 1
    for other_kind, revision in (("new", before), ("gone", after)):
        texts = [piece.text for piece in difference.instruction if piece.kind != other_kind]
        assert "".join(texts) == revision["subtask"]


def test_a_word_that_was_changed_in_a_long_instruction_is_marked_alone() -> None:
    words = [f"w{n % 90}" for n in range(900)]
    before, after = ({"worker": "alpha", "subtask": " ".join(words), "access": []} for words[450] in ("old", "new"))
    (difference,) = differences([before], [after])
    changed = [(piece.kind, piece.text.strip()) for piece in difference.instruction if piece.kind != "same"]
    assert changed == [("gone", "old"), ("new", "new")]
