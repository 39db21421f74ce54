"""Each client shows its user the same on every route that it speaks, streamed or not."""

import re
from collections.abc import Iterable
from typing import Any, Final

import pytest

from tests.clients.frameworks.conftest import Drive

pytestmark = pytest.mark.timeout(200)

SAID, TOOLS, TOTAL = "Heard: Hi", "Sunny in Oslo. Noon in Oslo.", 49
OBJECT = {"city": "Oslo", "degrees": 7, "note": "Oslo"}
BY_PROMPT = OBJECT | {"note": None}
WORDS = '{"city": "Oslo", "degrees": 7, "note": "Oslo"}'
COMMON: Final[dict[str, Any]] = {
    "text": SAID,
    "ultra": SAID,
    "streamed": SAID,
    "tools": TOOLS,
    "tools streamed": TOOLS,
    "tools over a workflow": TOOLS,
    "memory": "Heard: weather one | two",
    "object": OBJECT,
    "image": "Heard: see<image>",
}
FOUND = {"found": ["Sunny in Oslo."] * 2, "found by itself": ["Sunny in Oslo."] * 2}
"""By a deferred tool, whole and streamed: once where the server searches, once where the client does."""
MODES = {
    "chat": ("tool_call", "tools_strict", "json_mode", "json_schema_mode", "markdown_json_mode"),
    "responses": ("responses_tools",),
    "messages": ("anthropic_tools", "anthropic_json"),
}
ROUTES = {"openai": ("chat", "responses"), "all": ("chat", "responses", "messages")}


def alike(routes: Iterable[str], cases: dict[str, Any]) -> dict[str, Any]:
    """Return these cases for each route."""
    return {route: cases for route in routes}


def without_errors(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The report without the two cases that must fail: an unknown model, and a worker that breaks off in its answer.

    The first must be told as what it is. Of the other, some say nothing on the newer route, and one that it failed.
    """
    for route, cases in report.items():
        unknown, broken = cases.pop("unknown"), cases.pop("broken", None)
        assert "404" in unknown["says"] or "does not exist" in unknown["says"], (route, unknown)
        silent = broken is None or (route, broken) == ("responses", "Fo")
        assert silent or re.search("No eligible worker|refused the request|response.failed", broken["says"]), (
            route,
            broken,
        )
    return report


async def test_langchain(drive: Drive) -> None:
    report = without_errors(await drive("langchain", "recent"))
    both = {"objects": [OBJECT, OBJECT], "objects by tools": [OBJECT, OBJECT], "object of an agent": OBJECT}
    forced = {"forced": [["weather", {"city": "Oslo"}]], "usage": [TOTAL, TOTAL]}
    expected = {name: report for name, report in COMMON.items() if name != "object"} | both | forced
    assert report == alike(ROUTES["all"], expected)


@pytest.mark.parametrize(("environment", "text"), [("recent", "str"), ("node", "string")])
async def test_agents_sdk(drive: Drive, environment: str, text: str) -> None:
    report = without_errors(await drive("agents_sdk", environment))
    expected = COMMON | {
        "usage": TOTAL,
        "streamed": [SAID, SAID, TOTAL],
        "tools streamed": [TOOLS, TOOLS, 2 * TOTAL],
        "object streamed": [OBJECT, WORDS, TOTAL],
        "object behind tools": OBJECT,
        "handoff": ["Other", text],
    }
    newer = {"followed up": COMMON["memory"]} | (FOUND if environment == "node" else {"found": FOUND["found"][0]})
    assert report == {"chat": expected, "responses": expected | newer}


async def test_pydantic_ai(drive: Drive) -> None:
    report = without_errors(await drive("pydantic_ai", "recent"))
    streamed = {"usage": [TOTAL, TOTAL], "object streamed": OBJECT, "object behind tools": OBJECT}
    by_schema = {"object by schema": OBJECT, "object by schema, streamed": OBJECT}
    expected = COMMON | streamed
    prompted = {route: {"object by prompt": report[route].pop("object by prompt")["city"]} for route in report}
    assert {name: report["responses"].pop(name) for name in FOUND} == FOUND
    assert report == alike(ROUTES["openai"], expected | by_schema) | {"messages": expected}
    assert prompted == alike(ROUTES["all"], {"object by prompt": "Oslo"})


async def test_instructor(drive: Drive) -> None:
    report = await drive("instructor", "older")
    for route, modes in MODES.items():
        for mode in modes:
            expected = BY_PROMPT if mode == "json_mode" else OBJECT
            assert report[route].pop(mode) == report[route].pop(f"{mode} in parts") == expected, mode
    assert report == alike(MODES, {"objected": OBJECT})


async def test_llama_index(drive: Drive) -> None:
    report = without_errors(await drive("llama_index", "older"))
    assert report == alike(ROUTES["openai"], COMMON | {"forced": [["weather", {"city": "Oslo"}]]})


async def test_litellm(drive: Drive) -> None:
    report = without_errors(await drive("litellm", "older"))
    # Of a stream of its provider for vLLM it shows an estimate of its own.
    assert [report[route].pop("usage") for route in ("chat", "messages")] == [[TOTAL, TOTAL]] * 2
    assert report["like"].pop("usage")[0] == TOTAL
    assert report == alike(
        ("chat", "like", "messages"), {name: report for name, report in COMMON.items() if name != "memory"}
    )


async def test_litellm_on_its_other_surfaces(drive: Drive) -> None:
    report = without_errors(await drive("litellm_surfaces", "older"))
    names = ("text", "ultra", "streamed", "tools", "tools streamed", "tools over a workflow")
    messaged = {name: COMMON[name] for name in names}
    responded = messaged | {"tools not stored": TOOLS, "object": OBJECT, "usage": [TOTAL, TOTAL]}
    followed = responded | {"followed up": "Heard: one | two"}
    whole = {name: report for name, report in messaged.items() if "streamed" not in name}
    assert report == {
        **alike(("responses by chat", "responses by like"), followed),
        "responses by messages": responded,
        **alike(("messages by chat", "messages by like"), messaged),
        "messages by messages": whole,
    }


async def test_vercel(drive: Drive) -> None:
    report = without_errors(await drive("vercel", "node"))
    streamed = {"usage": [TOTAL, TOTAL], "object streamed": OBJECT, "object behind tools": OBJECT, "choice": "Oslo"}
    of_old = {"object of old": OBJECT, "object of old, streamed": OBJECT}
    forced = {"forced": [["weather", {"city": "Oslo"}]], "tools of an agent": TOOLS}
    assert {name: report["responses"].pop(name) for name in FOUND} == FOUND
    assert report == alike(("chat", "responses", "like", "messages"), COMMON | streamed | of_old | forced)


async def test_langchain_in_javascript(drive: Drive) -> None:
    report = without_errors(await drive("langchain", "node"))
    # Of a stream it takes the tokens of the input from its beginning, where Baton does not know them yet.
    assert report["messages"].pop("usage") == [TOTAL, 9]
    both = {"object by tools": OBJECT, "object of an agent": OBJECT, "forced": [["weather", {"city": "Oslo"}]]}
    usage = {"usage": [TOTAL, TOTAL]}
    assert report == alike(ROUTES["openai"], COMMON | both | usage) | {"messages": COMMON | both}
