"""LangChain's `ChatOpenAI`, on both of OpenAI's routes, `ChatAnthropic`, and an agent of LangChain's over each."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from report import BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, URL, V1, Place, clock, publish, report_of, weather

SEE = [{"type": "text", "text": "see"}, {"type": "image", "base64": PIXEL, "mime_type": "image/png"}]


def chat(tier: str = MINI) -> Any:
    """`stream_usage`: with an address of one's own it does not ask for the usage of a stream by itself."""
    return ChatOpenAI(model=tier, base_url=V1, api_key=KEY, max_retries=0, stream_usage=True)


def responses(tier: str = MINI) -> Any:
    return ChatOpenAI(model=tier, base_url=V1, api_key=KEY, max_retries=0, use_responses_api=True)


def messages(tier: str = MINI) -> Any:
    return ChatAnthropic(model=tier, base_url=URL, api_key=KEY, max_retries=0)


async def join_pieces(pieces: AsyncIterator[AIMessageChunk]) -> AIMessageChunk:
    all_pieces = [piece async for piece in pieces]
    return sum(all_pieces[1:], all_pieces[0])


async def agent(model: Any, words: list[str], **more: Any) -> Any:
    """The last answer of a talk with an agent that remembers."""
    new_agent = create_agent(model, [weather, clock], checkpointer=InMemorySaver(), **more)
    where = {"configurable": {"thread_id": "1"}}
    for text in words:
        last = await new_agent.ainvoke({"messages": [{"role": "user", "content": text}]}, where)
    return last.get("structured_response") or last["messages"][-1].text


async def agent_streamed(model: Any) -> str:
    messages = create_agent(model, [weather, clock]).astream(
        {"messages": [{"role": "user", "content": "weather clock"}]}, stream_mode="messages"
    )
    return "".join([piece.text async for piece, _ in messages if isinstance(piece, AIMessageChunk)])


async def drive(make: Callable[..., Any]) -> dict[str, Any]:
    model = make()

    async def usage() -> list[int]:
        both = (await model.ainvoke("Hi")), (await join_pieces(model.astream("Hi")))
        return [reply.usage_metadata["total_tokens"] for reply in both]

    async def forced() -> list[Any]:
        message = await model.bind_tools([weather, clock], tool_choice="weather").ainvoke("Hi")
        return [[call["name"], call["args"]] for call in message.tool_calls]

    async def objects(method: str) -> list[Any]:
        bound = model.with_structured_output(Place, method=method)
        return [
            (await bound.ainvoke("Where?")).model_dump(),
            [chunk async for chunk in bound.astream("Where?")][-1].model_dump(),
        ]

    async def text(content: Any, tier: str = MINI) -> str:
        return (await make(tier).ainvoke(content)).text

    async def streamed(tier: str = MINI) -> str:
        return (await join_pieces(make(tier).astream("Hi"))).text

    return await report_of(
        {
            "text": lambda: text("Hi"),
            "ultra": lambda: text("Hi", ULTRA),
            "streamed": streamed,
            "usage": usage,
            "tools": lambda: agent(model, ["weather clock"]),
            "tools streamed": lambda: agent_streamed(model),
            "tools over a workflow": lambda: agent(make(ULTRA), ["weather clock"]),
            "memory": lambda: agent(model, ["weather one", "two"]),
            "forced": forced,
            "objects": lambda: objects("json_schema"),
            "objects by tools": lambda: objects("function_calling"),
            "object of an agent": lambda: agent(model, ["weather"], response_format=Place),
            "image": lambda: text([HumanMessage(SEE)]),
            "unknown": lambda: text("Hi", NOTHING),
            "broken": lambda: streamed(BROKEN),
        }
    )


async def main() -> None:
    publish({make.__name__: await drive(make) for make in (chat, responses, messages)})


asyncio.run(main())
