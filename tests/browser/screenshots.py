"""The pictures of the console in the guide: `python -m tests.browser.screenshots [PROGRAM OF CHROMIUM]`.

A gateway and an engine over Postgres and Redis answer with texts of a planning company; the pages are then shown in
the light and in the dark theme and at the width of a phone, and stored in `deploy/docs/images/` as WebP.
"""

import base64
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from tests.browser.conftest import chromium, sign_in
from tests.browser.distributed import Service, serving
from tests.harness import servers
from tests.stubs import Fail, Reply, Stall, Usage, plan_reply

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER: Final = Path(__file__).resolve().parents[2] / "deploy/docs/images"
QUALITY: Final = 60
DESKTOP: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 390, "height": 780}
QUESTION: Final = "Which of our three offices should take the team of twelve in March, and what would it cost a month?"
PLAN: Final = plan_reply(
    (0, "List what a team of twelve needs: desks, rooms, travel. Do not choose an office.", ["user"]),
    (1, "Compute the monthly cost of each office for twelve people.", ["user"]),
    (2, "Choose one office from the needs and the costs, and say why in three sentences.", ["user", 0, 1]),
)
ANSWER: Final = (
    "Take the office in Bonn. ",
    "It has fourteen free desks and two rooms, where Essen has only nine desks and Trier no room at all. ",
    "At 6,240 euros a month it costs 380 euros more than Essen, and saves the team about thirty hours of travel.",
)


class Picture(Struct, frozen=True):
    """One picture: the file's name, the page, and how it is looked at. `to` is scrolled to the top."""

    name: str
    address: str
    theme: str = "light"
    is_phone: bool = False
    to: str = "body"


def send_question(service: Service, tier: str, question: str, **more: object) -> str:
    """Send a request; return the id of its run, whatever becomes of it."""
    body = {"model": tier, "messages": [{"role": "user", "content": question}], **more}
    return service.caller.http.post("/v1/chat/completions", json=body).headers["x-baton-run"]


def play_pictured_runs(service: Service) -> dict[str, str]:
    """Carry out runs of several kinds; return those that pictures show by name."""
    stub, runs = service.stub, {}
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Reply(chunks=ANSWER, first_delay=0.12, gap=0.08, usage=Usage(input=840, output=96)))
    stub.always("planner", replace(PLAN, gap=0.01))
    for question in ("What is due on Friday?", "Sum up the minutes.", "Draft a reply to the landlord."):
        send_question(service, "baton-mini", question)
    for worker in ("alpha", "beta"):
        stub.script(worker, Fail(status=529, message="The model is overloaded. Try again later."))
    runs["run"] = send_question(service, "baton-ultra", QUESTION)
    runs["again"] = str(service.api("POST", f"/v1/runs/{runs['run']}/replay", json={"wait": 60}).json()["id"])
    preview = {"model": "baton-ultra", "messages": [{"role": "user", "content": QUESTION}]}
    runs["plan"] = str(service.api("POST", "/v1/plans", json=preview).json()["id"])
    more = {"baton": {"approval": "required"}}
    runs["waiting"] = send_question(service, "baton-ultra", "Compare the salaries of both teams.", **more)
    return runs


def pictures(service: Service, runs: dict[str, str]) -> list[Picture]:
    """The pictures that are addresses, in the order of the guide."""
    run = f"/console/runs/{runs['run']}"
    return [
        Picture("overview", "/console?period=hour", to="h2:has-text('In this period')"),
        Picture("runs", "/console/runs"),
        Picture("run", f"{run}?step=2"),
        Picture("run-dark", f"{run}?step=2", theme="dark"),
        Picture("run-phone", f"{run}?step=2", is_phone=True, to="#run-graph"),
        Picture("run-step", f"{run}?step=2", to="#run-timeline"),
        Picture("disclosures", "/console/disclosures?saw=user"),
        Picture("compare", f"/console/compare?a={runs['run']}&b={runs['again']}"),
        Picture("plan", f"/console/plans/{runs['plan']}", theme="dark"),
        Picture("approval", f"{service.admin}/console/approvals/{runs['waiting']}"),
        Picture("keys-phone", f"{service.admin}/console/admin/keys", theme="dark", is_phone=True),
    ]


def take_picture(page: "Page", name: str) -> None:
    """Store a picture of what the page shows."""
    session = page.context.new_cdp_session(page)
    reply = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    (FOLDER / f"{name}.webp").write_bytes(base64.b64decode(reply["data"]))
    session.detach()


def open_picture(page: "Page", picture: Picture) -> None:
    """Open the page of a picture."""
    page.set_viewport_size(PHONE if picture.is_phone else DESKTOP)  # type: ignore[arg-type]
    page.emulate_media(color_scheme=picture.theme)  # type: ignore[arg-type]
    page.goto(picture.address)
    page.locator(picture.to).evaluate("one => one.scrollIntoView()")


def playground(page: "Page", service: Service) -> None:
    """Take a picture of the playground while the answer streams."""
    for worker in ("alpha", "beta", "gamma"):
        service.stub.always(worker, Reply(chunks=ANSWER, usage=Usage(input=840, output=96)))
    open_picture(page, Picture("playground", "/console/playground"))
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_label("Tier").select_option("baton-ultra")
    service.stub.always("planner", replace(PLAN, fault=Stall(after="close")))
    page.get_by_role("button", name="Ask").click()
    steps = page.locator("#run-steps li")
    steps.locator(".done").nth(1).wait_for()
    for worker in ("alpha", "beta", "gamma"):
        service.stub.always(worker, Reply(chunks=ANSWER, fault=Stall(after=2)))
    service.stub.release()
    page.get_by_text("Trier no room").wait_for()
    page.locator("body").evaluate("one => one.scrollIntoView()")
    take_picture(page, "playground")
    service.stub.release()


def main() -> None:
    """Take all pictures, and print their sizes."""
    program = sys.argv[1] if len(sys.argv) > 1 else shutil.which("chromium")
    FOLDER.mkdir(exist_ok=True)
    with servers.postgres() as postgres, servers.redis() as redis, serving(postgres.url, redis.url) as service:
        runs = play_pictured_runs(service)
        with chromium(program) as browser:
            _photograph(browser, service, runs)
    sizes = {file.name: file.stat().st_size for file in sorted(FOLDER.glob("*.webp"))}
    for name, size in sizes.items():
        print(f"{name:<24}{size / 1024:7.1f} kB")
    print(f"{'together':<24}{sum(sizes.values()) / 1024:7.1f} kB")


def _photograph(browser: "Browser", service: Service, runs: dict[str, str]) -> None:
    page = browser.new_page(base_url=service.url)
    sign_in(page)
    for picture in pictures(service, runs):
        open_picture(page, picture)
        take_picture(page, picture.name)
    playground(page, service)


if __name__ == "__main__":
    main()
