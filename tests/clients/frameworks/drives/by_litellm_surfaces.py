"""LiteLLM's other two surfaces: `aresponses`, and Anthropic's messages, each over its three providers."""

import asyncio
import json
from typing import Any

import litellm
from report import BROKEN, KEY, MINI, NOTHING, ULTRA, URL, V1, Place, clock, publish, report_of, weather

FUNCTIONS = {"weather": weather, "clock": clock}
SCHEMAS = {
    name: {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    for name, field in (("weather", "city"), ("clock", "zone"))
}
TOOLS = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
BLOCKS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
ROUTES = {"chat": ("openai/", V1), "like": ("hosted_vllm/", V1), "messages": ("anthropic/", URL)}


def plain(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else item.model_dump()


def words(response: Any) -> str:
    items = map(plain, response.output)
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])


def result(name: str, arguments: str | dict[str, Any]) -> str:
    return FUNCTIONS[name](**(json.loads(arguments) if isinstance(arguments, str) else arguments))


async def responded(prefix: str, base: str) -> dict[str, Any]:
    async def ask(content: Any, tier: str = MINI, streams: bool = False, **more: Any) -> Any:
        where = {"model": prefix + tier, "api_base": base, "api_key": KEY, "num_retries": 0, "stream": streams}
        response = await litellm.aresponses(input=content, **where, **more)
        return [event async for event in response][-1].response if streams else response

    async def loop(tier: str, streams: bool, **more: Any) -> str:
        items: list[Any] = [{"role": "user", "content": "weather clock"}]
        while True:
            response = await ask(items, tier, streams, tools=TOOLS, **more)
            calls = [item for item in map(plain, response.output) if item["type"] == "function_call"]
            if not calls:
                return words(response)
            items += map(plain, response.output)
            for call in calls:
                output = result(call["name"], call["arguments"])
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})

    async def remembered() -> str:
        first = await ask("one")
        return words(await ask("two", previous_response_id=first.id))

    async def text(*args: Any, **more: Any) -> str:
        return words(await ask(*args, **more))

    async def usage() -> list[int]:
        return [(await ask("Hi", streams=streams)).usage.total_tokens for streams in (False, True)]

    async def structured() -> Place:
        return Place.model_validate_json(await text("Where?", text_format=Place))

    return await report_of(
        {
            "text": lambda: text("Hi"),
            "ultra": lambda: text("Hi", ULTRA),
            "streamed": lambda: text("Hi", streams=True),
            "usage": usage,
            "tools": lambda: loop(MINI, False),
            "tools streamed": lambda: loop(MINI, True),
            "tools over a workflow": lambda: loop(ULTRA, True),
            "tools not stored": lambda: loop(MINI, True, store=False),
            "object": structured,
            "unknown": lambda: text("Hi", NOTHING),
            "broken": lambda: text("Hi", BROKEN, streams=True),
        }
        | ({} if prefix == "anthropic/" else {"followed up": remembered})
    )


async def blocks(streamed: Any) -> list[dict[str, Any]]:
    """The content of a stream, which comes as lines of bytes or as events."""
    pieces = [piece async for piece in streamed]
    lines = b"".join(piece for piece in pieces if isinstance(piece, bytes)).split(b"\n")
    events = [piece for piece in pieces if isinstance(piece, dict)]
    events += [json.loads(line[5:]) for line in lines if line.startswith(b"data:")]
    blocks_by_index: dict[int, dict[str, Any]] = {}
    for event in events:
        delta = event.get("delta", {})
        if event["type"] == "error":
            raise RuntimeError(event["error"]["message"])
        if event["type"] == "content_block_start":
            blocks_by_index[event["index"]] = dict(event["content_block"]) | {"json": ""}
        elif event["type"] == "content_block_delta":
            blocks_by_index[event["index"]]["text"] = blocks_by_index[event["index"]].get("text", "") + delta.get(
                "text", ""
            )
            blocks_by_index[event["index"]]["json"] += delta.get("partial_json", "")
    return [_block(block) for block in blocks_by_index.values()]


def _block(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return {name: block[name] for name in ("type", "id", "name")} | {"input": json.loads(block["json"])}


async def messaged(prefix: str, base: str) -> dict[str, Any]:
    async def ask(messages: list[Any], tier: str = MINI, streams: bool = False, **more: Any) -> list[dict[str, Any]]:
        where = {"model": prefix + tier, "api_base": base, "api_key": KEY, "max_tokens": 100, "stream": streams}
        message = await litellm.anthropic.messages.acreate(messages=messages, **where, **more)
        return await blocks(message) if streams else message["content"]

    async def text(tier: str = MINI, streams: bool = False) -> str:
        return (await ask([{"role": "user", "content": "Hi"}], tier, streams))[0]["text"]

    async def loop(tier: str, streams: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": "weather clock"}]
        while True:
            message = await ask(messages, tier, streams, tools=BLOCKS)
            calls = [block for block in message if block["type"] == "tool_use"]
            if not calls:
                return message[0]["text"]
            results = [
                {"type": "tool_result", "tool_use_id": call["id"], "content": result(call["name"], call["input"])}
                for call in calls
            ]
            messages += [{"role": "assistant", "content": message}, {"role": "user", "content": results}]

    own = prefix == "anthropic/"  # streams of this one need the packages of LiteLLM's gateway
    streamed = {
        "streamed": lambda: text(streams=True),
        "tools streamed": lambda: loop(MINI, True),
        "broken": lambda: text(BROKEN, streams=True),
    }
    whole = {
        "text": text,
        "ultra": lambda: text(ULTRA),
        "tools": lambda: loop(MINI, False),
        "tools over a workflow": lambda: loop(ULTRA, not own),
        "unknown": lambda: text(NOTHING),
    }
    return await report_of(whole | ({} if own else streamed))


async def main() -> None:
    litellm.suppress_debug_info = True
    report = {f"responses by {name}": await responded(*route) for name, route in ROUTES.items()}
    publish(report | {f"messages by {name}": await messaged(*route) for name, route in ROUTES.items()})


asyncio.run(main())
