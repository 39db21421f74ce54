"""LlamaIndex's `OpenAILike`, on both of OpenAI's routes, and an agent over each."""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from report import BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, V1, Place, clock, publish, report_of, weather

PNG = ImageBlock(image=base64.b64decode(PIXEL), image_mimetype="image/png")


def chat(tier: str = MINI) -> Any:
    return OpenAILike(
        model=tier,
        api_base=V1,
        api_key=KEY,
        max_retries=0,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
    )


def responses(tier: str = MINI) -> Any:
    return OpenAILikeResponses(model=tier, api_base=V1, api_key=KEY, max_retries=0, is_function_calling_model=True)


async def drive(make: Callable[..., Any]) -> dict[str, Any]:
    model = make()

    async def text(tier: str = MINI) -> str:
        return (await make(tier).achat([ChatMessage("Be brief.", role="system"), ChatMessage("Hi")])).message.content

    async def streamed(tier: str = MINI) -> str:
        return [chunk async for chunk in await make(tier).astream_chat([ChatMessage("Hi")])][-1].message.content

    async def agent(tier: str, streams: bool) -> str:
        return str(await FunctionAgent(tools=[weather, clock], llm=make(tier), streaming=streams).run("weather clock"))

    async def remembered() -> str:
        memory = ChatMemoryBuffer.from_defaults(token_limit=4000, tokenizer_fn=str.split)
        new_agent = FunctionAgent(tools=[weather], llm=model)
        await new_agent.run("weather one", memory=memory)
        return str(await new_agent.run("two", memory=memory))

    async def forced() -> list[Any]:
        tools = [FunctionTool.from_defaults(tool) for tool in (weather, clock)]
        reply = await model.achat_with_tools(tools, user_msg="weather", tool_required=True)
        return [[call.tool_name, call.tool_kwargs] for call in model.get_tool_calls_from_response(reply)]

    async def structured() -> Any:
        return (await model.as_structured_llm(Place).acomplete("Where?")).raw

    async def image() -> str:
        question = ChatMessage(role="user", blocks=[TextBlock(text="see"), PNG])
        return (await model.achat([question])).message.content

    return await report_of(
        {
            "text": text,
            "ultra": lambda: text(ULTRA),
            "streamed": streamed,
            "tools": lambda: agent(MINI, False),
            "tools streamed": lambda: agent(MINI, True),
            "tools over a workflow": lambda: agent(ULTRA, True),
            "memory": remembered,
            "forced": forced,
            "object": structured,
            "image": image,
            "unknown": lambda: text(NOTHING),
            "broken": lambda: streamed(BROKEN),
        }
    )


async def main() -> None:
    publish({make.__name__: await drive(make) for make in (chat, responses)})


asyncio.run(main())
