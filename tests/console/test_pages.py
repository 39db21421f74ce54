"""Every page of the console has its headers, templates that escape, and files of its own."""

import gzip
import re
from pathlib import Path

import pytest

from app.console.app import ASSETS, FILES
from app.console.templating import (
    NOTHING,
    TEMPLATES,
    basis,
    brief,
    describe_approval_reason,
    describe_source,
    plain,
    seconds,
    usd,
    worker,
)
from tests.harness.console import console_client, signed_in_client
from tests.harness.stand_ins import GatewayStandIn

DOCS = Path(__file__).resolve().parents[2] / "deploy/docs"
EVERY_TEMPLATE = sorted(TEMPLATES.glob("**/*.html"))
SHIPPED_BYTES = 60 << 10
"""The most that scripts and styles may weigh, compressed."""


async def test_a_page_may_run_its_own_files_and_nothing_else(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client:
        first, second = await client.get("/console/runs"), await client.get("/console/runs")
    rules = dict(rule.strip().split(" ", 1) for rule in first.headers["content-security-policy"].split(";"))
    nonce = re.search(r"'nonce-([^']+)'", rules["script-src"])
    assert nonce is not None
    assert nonce[1] not in second.text
    assert set(re.findall(r'<script nonce="([^"]*)"', first.text)) == {nonce[1]}
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["style-src"] == rules["connect-src"] == rules["form-action"] == "'self'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert rules["trusted-types"] == "htmx"
    assert "unsafe" not in str(rules)
    assert first.headers["cache-control"] == "no-store"
    assert first.headers["referrer-policy"] == "same-origin", (
        "without HTTPS, forms would have no origin with no-referrer"
    )


async def test_files_are_served_with_their_types(gateway: GatewayStandIn) -> None:
    async with console_client(gateway.app) as client:
        for name, media_type in ASSETS.items():
            reply = await client.get(f"/console/static/{name}")
            assert reply.headers["content-type"].startswith(media_type)
            assert reply.content == (FILES / name).read_bytes()
        for path in ("/console/static/none.js", "/console/static/../app.py", "/console/none"):
            assert (await client.get(path)).status_code == 404


def test_scripts_and_styles_are_light_and_licensed() -> None:
    assert sum(len(gzip.compress((FILES / name).read_bytes())) for name in ASSETS) <= SHIPPED_BYTES
    assert {path.name for path in FILES.iterdir()} - set(ASSETS) == {"htmx_license.txt", "uplot_license.txt"}


def test_htmx_begins_with_its_extensions_however_late_they_come() -> None:
    """While the document is read it waits for the document's end; deferred, it begins when a timer ends, at which an
    extension may not have come yet, so that the page is not followed."""
    body = (TEMPLATES / "frame.html").read_text().partition("<body>")[2]
    tags = re.findall(r"<script([^>]*)>", body)
    assert [re.findall(r"static/([\w-]+)\.min\.js", tag) for tag in tags] == [["htmx"], ["hx-csp"], ["hx-sse"]]
    assert not re.search(r"\b(defer|async|type)\b", " ".join(tags))


@pytest.mark.parametrize("path", EVERY_TEMPLATE, ids=lambda path: path.name)
def test_a_template_escapes_everything_and_has_no_code_in_attributes(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|Markup", text)
    assert not re.search(r"\son[a-z]+=|\sstyle=|javascript:", text)
    assert not re.search(r"<script(?! nonce=\"\{\{ nonce \}\}\" src=\"/console/static/)", text)
    assert not re.search(r"=\s*\{\{|='\{\{", text), "an attribute without double quotes can be left by its value"
    assert not re.search(r'(?:src|href|action)="(?:https?:)?//', text)


@pytest.mark.parametrize("path", EVERY_TEMPLATE, ids=lambda path: path.name)
def test_a_time_says_its_zone_unless_it_fills_a_cell_whose_column_says_it(path: Path) -> None:
    source = path.read_text()
    cells = re.findall(r"<t[dh][^>]*>\{\{ [\w.]+\|when \}\}</t[dh]>", source)
    assert source.count("|when") == len(cells)
    if cells:
        assert "(UTC)" in source


@pytest.mark.parametrize(
    ("text", "visible_text"),
    [
        ("a\x00b\x1b[31m\x7f", "a␀b␛[31m␡"),
        ("user\u202etxt.exe\u2066\u061c", "user[U+202E]txt.exe[U+2066][U+061C]"),
        ("a\x9bb\u200b\ufeff\u2028\U000e0041", "a[U+009B]b[U+200B][U+FEFF][U+2028][U+E0041]"),
        ("a\U000e0148\ufe00\u00ad\u3164", "a[U+E0148][U+FE00][U+00AD][U+3164]"),
        ("\u2764\ufe0f", "\u2764\ufe0f"),
        ("\U0001f469\u200d\U0001f4bb é", "\U0001f469\u200d\U0001f4bb é"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_invisible_characters_are_made_visible(text: str, visible_text: str) -> None:
    assert plain(text) == visible_text


def test_words_of_the_api_are_told_in_plain_words() -> None:
    assert [worker(name) for name in ("@conductor", "\x00ada")] == ["the conductor itself", "␀ada"]
    places = ["user", "1.0", "2.3", "1.1.0"]
    assert [describe_source(place) for place in places] == [
        "the conversation",
        "step 0",
        "step 3 of round 2",
        "step 1.1.0",
    ]
    assert [describe_approval_reason(word) for word in ("requested", "label:phi", "worker:ada", "price", "new")] == [
        "its request",
        "the label phi",
        "the worker ada",
        "its price",
        "new",
    ]
    assert basis({"basis": "prices", "runs": 0}) == "prices and usual sizes"
    assert basis({"basis": "history", "runs": 1}) == "1 earlier run"
    assert basis({"basis": "mixed", "runs": 7}).startswith("7 earlier runs, and prices")


def test_a_long_text_says_how_much_is_left_out() -> None:
    assert brief("word " * 4, 9) == "word word… (10 more characters)"
    assert brief("short", 9) == "short"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (None, NOTHING),
        (0, "$0"),
        (0.000012, "$0.000012"),
        (0.25, "$0.25"),
        (0.2512, "$0.2512"),
        (1234.5, "$1,234.50"),
        (-0.5, "-$0.50"),
    ],
)
def test_money_has_the_digits_that_it_needs(amount: float | None, text: str) -> None:
    assert usd(amount) == text


@pytest.mark.parametrize(
    ("length", "text"), [(None, NOTHING), (0.0042, "4 ms"), (3.21, "3.2 s"), (125, "2 min 5 s"), (9000, "2 h 30 min")]
)
def test_lengths_of_time_have_a_fitting_unit(length: float | None, text: str) -> None:
    assert seconds(length) == text


def test_the_guide_has_a_small_picture_with_a_description_wherever_it_names_one() -> None:
    pictures = re.findall(r"!\[([^]]*)\]\(([^)]+)\)", (DOCS / "console.md").read_text())
    assert all(len(alt) > 10 for alt, _path in pictures)
    stored = sorted((DOCS / "images").iterdir())
    assert sorted(path for _alt, path in pictures) == [f"images/{picture.name}" for picture in stored]
    assert sum(picture.stat().st_size for picture in stored) <= 600_000
