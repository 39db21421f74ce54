"""OpenAI's Agents SDK over both of its models: tools, handoffs, outputs with a type, sessions, streams."""

import asyncio
from collections.abc import Callable
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    ToolSearchTool,
    function_tool,
)
from openai import AsyncOpenAI
from report import BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, V1, Place, clock, publish, report_of, weather

TOOLS = [function_tool(weather), function_tool(clock)]
SILENT = RunConfig(tracing_disabled=True)
COUNTED = ModelSettings(include_usage=True)
SEE = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}]


async def streamed(agent: Agent, text: str) -> list[Any]:
    """The final output, the words as they came, and the tokens."""
    run, words = Runner.run_streamed(agent, text, run_config=SILENT), ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            words += event.data.delta
    output = run.final_output
    return [output.model_dump() if isinstance(output, Place) else output, words, run.context_wrapper.usage.total_tokens]


async def drive(model: Callable[[str], Any], stored: bool) -> dict[str, Any]:
    def agent(tier: str = MINI, **more: Any) -> Agent:
        return Agent(name="Asker", instructions="Be brief.", model=model(tier), model_settings=COUNTED, **more)

    async def run(messages: Any, tier: str = MINI, **more: Any) -> Any:
        return (await Runner.run(agent(tier, **more), messages, run_config=SILENT)).final_output

    async def usage() -> int:
        return (await Runner.run(agent(), "Hi", run_config=SILENT)).context_wrapper.usage.total_tokens

    async def remembered() -> str:
        session = SQLiteSession("talk")
        for text in ("weather one", "two"):
            last = await Runner.run(agent(tools=TOOLS), text, session=session, run_config=SILENT)
        return last.final_output

    async def followed_up() -> str:
        first = await Runner.run(agent(tools=TOOLS), "weather one", run_config=SILENT)
        last = await Runner.run(agent(), "two", previous_response_id=first.last_response_id, run_config=SILENT)
        return last.final_output

    async def handed_over() -> list[str]:
        other = agent(tools=TOOLS)
        other.name = "Other"
        ended = await Runner.run(agent(handoffs=[other]), "transfer_to_other: weather", run_config=SILENT)
        return [ended.last_agent.name, type(ended.final_output).__name__]

    cases = {
        "text": lambda: run("Hi"),
        "ultra": lambda: run("Hi", ULTRA),
        "streamed": lambda: streamed(agent(), "Hi"),
        "usage": usage,
        "tools": lambda: run("weather clock", tools=TOOLS),
        "tools streamed": lambda: streamed(agent(tools=TOOLS), "weather clock"),
        "tools over a workflow": lambda: run("weather clock", ULTRA, tools=TOOLS),
        "memory": remembered,
        "object": lambda: run("Where?", output_type=Place),
        "object streamed": lambda: streamed(agent(output_type=Place), "Where?"),
        "object behind tools": lambda: run("weather", tools=TOOLS, output_type=Place),
        "handoff": handed_over,
        "image": lambda: run([{"role": "user", "content": SEE}]),
        "unknown": lambda: run("Hi", NOTHING),
        "broken": lambda: streamed(agent(BROKEN), "Hi"),
    }
    tools = [function_tool(weather, defer_loading=True), ToolSearchTool()]
    newer = {"followed up": followed_up, "found": lambda: run("weather", tools=tools)}
    return await report_of(cases | (newer if stored else {}))


async def main() -> None:
    async with AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as client:
        publish(
            {
                "chat": await drive(lambda tier: OpenAIChatCompletionsModel(tier, openai_client=client), False),
                "responses": await drive(lambda tier: OpenAIResponsesModel(tier, openai_client=client), True),
            }
        )


asyncio.run(main())
