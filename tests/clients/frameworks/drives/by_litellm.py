"""LiteLLM as a client: its providers for OpenAI's chat and responses, for servers like OpenAI's, and for Anthropic."""

import asyncio
from typing import Any

import litellm
from report import BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, URL, V1, Place, clock, publish, report_of, weather

FUNCTIONS = {"weather": weather, "clock": clock}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]},
        },
    }
    for name, field in (("weather", "city"), ("clock", "zone"))
]
ROUTES = {"chat": ("openai/", V1), "like": ("hosted_vllm/", V1), "messages": ("anthropic/", URL)}
SEE = [
    {"type": "text", "text": "see"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
]


async def drive(prefix: str, base: str) -> dict[str, Any]:
    async def ask(content: Any, tier: str = MINI, streams: bool = False, **more: Any) -> Any:
        messages = (
            content if isinstance(content[0], dict) and "role" in content[0] else [{"role": "user", "content": content}]
        )
        where = {"model": prefix + tier, "api_base": base, "api_key": KEY, "num_retries": 0, "messages": messages}
        if not streams:
            return await litellm.acompletion(**where, **more)
        counted = {"stream": True, "stream_options": {"include_usage": True}}
        return litellm.stream_chunk_builder(
            [chunk async for chunk in await litellm.acompletion(**where, **counted, **more)]
        )

    async def text(*args: Any, **more: Any) -> str:
        return (await ask(*args, **more)).choices[0].message.content

    async def usage() -> list[int]:
        return [(await ask("Hi", streams=streams)).usage.total_tokens for streams in (False, True)]

    async def loop(tier: str, streams: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": "weather clock"}]
        while (message := (await ask(messages, tier, streams, tools=TOOLS)).choices[0].message).tool_calls:
            messages.append(message)
            for call in message.tool_calls:
                result = FUNCTIONS[call.function.name](**litellm.utils.json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return message.content

    async def structured() -> Any:
        return Place.model_validate_json(await text("Where?", response_format=Place))

    return await report_of(
        {
            "text": lambda: text("Hi"),
            "ultra": lambda: text("Hi", ULTRA),
            "streamed": lambda: text("Hi", streams=True),
            "usage": usage,
            "tools": lambda: loop(MINI, False),
            "tools streamed": lambda: loop(MINI, True),
            "tools over a workflow": lambda: loop(ULTRA, True),
            "object": structured,
            "image": lambda: text(SEE),
            "unknown": lambda: text("Hi", NOTHING),
            "broken": lambda: text("Hi", BROKEN, streams=True),
        }
    )


async def main() -> None:
    litellm.suppress_debug_info = True
    publish({name: await drive(*route) for name, route in ROUTES.items()})


asyncio.run(main())
