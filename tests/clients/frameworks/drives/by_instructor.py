"""Instructor over both official clients: an object in every mode, whole, in parts, and after an objection."""

import asyncio
from typing import Any

import instructor
from anthropic import Anthropic
from instructor import Mode
from openai import OpenAI
from pydantic import field_validator
from report import KEY, MINI, URL, V1, Place, publish, report_of

ASKED = {"model": MINI, "messages": [{"role": "user", "content": "Where? Answer in JSON."}]}
MODES = {
    "chat": (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA, Mode.MD_JSON),
    "responses": (Mode.RESPONSES_TOOLS,),
    "messages": (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON),
}


class Elsewhere(Place):
    """Nothing is right at first."""

    @field_validator("city")
    @classmethod
    def once(cls, city: str, cities: list[str] = []) -> str:  # noqa: B006
        """The second answer is taken."""
        cities.append(city)
        assert len(cities) > 1, "Say it again."
        return city


def client(route: str, mode: Mode) -> Any:
    if route == "messages":
        return instructor.from_anthropic(Anthropic(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    return instructor.from_openai(OpenAI(base_url=V1, api_key=KEY, max_retries=0), mode=mode)


async def drive(route: str) -> dict[str, Any]:
    request_body: dict[str, Any] = ASKED | ({"max_tokens": 100} if route == "messages" else {})

    async def created(mode: Mode) -> Any:
        return client(route, mode).create(**request_body, response_model=Place)

    async def in_parts(mode: Mode) -> Any:
        return list(client(route, mode).create_partial(**request_body, response_model=Place))[-1]

    async def objected() -> Any:
        return client(route, MODES[route][0]).create(**request_body, response_model=Elsewhere, max_retries=2)

    objects = {mode.value: (lambda mode=mode: created(mode)) for mode in MODES[route]}
    parts = {f"{mode.value} in parts": (lambda mode=mode: in_parts(mode)) for mode in MODES[route]}
    return await report_of(objects | parts | {"objected": objected})


async def main() -> None:
    publish({route: await drive(route) for route in MODES})


asyncio.run(main())
