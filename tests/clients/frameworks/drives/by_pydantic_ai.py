"""Pydantic AI over its three models: tools, outputs by tool, by schema and by prompt, streams, histories."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

from anthropic import AsyncAnthropic
from pydantic_ai import Agent, BinaryContent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.capabilities import ToolSearch
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.native_tools._tool_search import ToolSearchTool
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, URL, V1, Place, clock, publish, report_of, weather

PNG = BinaryContent(base64.b64decode(PIXEL), media_type="image/png")


async def drive(model: Callable[[str], Any], native: bool) -> dict[str, Any]:
    def agent(tier: str = MINI, **more: Any) -> Agent:
        return Agent(model(tier), instructions="Be brief.", **more)

    async def run(text: Any, tier: str = MINI, **more: Any) -> Any:
        return (await agent(tier, **more).run(text)).output

    async def streamed(text: str, tier: str = MINI, **more: Any) -> Any:
        async with agent(tier, **more).run_stream(text) as run:
            return [output async for output in run.stream_output(debounce_by=None)][-1]

    async def usage() -> list[int]:
        async with agent().run_stream("Hi") as run:
            await run.get_output()
        return [(await agent().run("Hi")).usage.total_tokens, run.usage.total_tokens]

    async def remembered() -> str:
        async with agent(tools=[weather]).run_stream("weather one") as run:
            await run.get_output()
        return (await agent(tools=[weather]).run("two", message_history=run.all_messages())).output

    cases = {
        "text": lambda: run("Hi"),
        "ultra": lambda: run("Hi", ULTRA),
        "streamed": lambda: streamed("Hi"),
        "usage": usage,
        "tools": lambda: run("weather clock", tools=[weather, clock]),
        "tools streamed": lambda: streamed("weather clock", tools=[weather, clock]),
        "tools over a workflow": lambda: run("weather clock", ULTRA, tools=[weather, clock]),
        "memory": remembered,
        "object": lambda: run("Where?", output_type=ToolOutput(Place)),
        "object streamed": lambda: streamed("Where?", output_type=ToolOutput(Place)),
        "object behind tools": lambda: run("weather", tools=[weather], output_type=ToolOutput(Place)),
        "object by prompt": lambda: run("Where?", output_type=PromptedOutput(Place)),
        "image": lambda: run(["see", PNG]),
        "unknown": lambda: run("Hi", NOTHING),
        "broken": lambda: streamed("Hi", BROKEN),
    }
    if native:
        cases["object by schema"] = lambda: run("Where?", output_type=NativeOutput(Place))
        cases["object by schema, streamed"] = lambda: streamed("Where?", output_type=NativeOutput(Place))
    return await report_of(cases)


async def searched(provider: OpenAIProvider) -> dict[str, Any]:
    """A deferred tool, found by the server or by itself. Which models can search it knows by their names."""
    model = OpenAIResponsesModel(
        MINI, provider=provider, profile={"supported_native_tools": frozenset({ToolSearchTool})}
    )

    async def both(**how: Any) -> list[str]:
        new_agent = Agent(model, tools=[Tool(weather, defer_loading=True)], capabilities=[ToolSearch(**how)])
        async with new_agent.run_stream("tool_search weather") as run:
            streamed = await run.get_output()
        return [(await new_agent.run("tool_search weather")).output, streamed]

    def all_of_them(_ctx: Any, _queries: Any, tools: Any) -> list[str]:
        return [tool.name for tool in tools]

    return await report_of({"found": both, "found by itself": lambda: both(strategy=all_of_them)})


async def main() -> None:
    openai = OpenAIProvider(base_url=V1, api_key=KEY)
    async with AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        anthropic = AnthropicProvider(anthropic_client=client)
        publish(
            {
                "chat": await drive(lambda tier: OpenAIChatModel(tier, provider=openai), True),
                "responses": await drive(lambda tier: OpenAIResponsesModel(tier, provider=openai), True)
                | await searched(openai),
                "messages": await drive(lambda tier: AnthropicModel(tier, provider=anthropic), False),
            }
        )


asyncio.run(main())
