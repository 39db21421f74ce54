"""A conversation as messages of OpenAI's chat completions, with the variants of tools in compatible servers."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from app.core.message.chat import Image, Message, Part, Text
from app.core.records import record
from app.providers.functions import openai_calls

LONGEST_ID = 40
PICTURES = "Images that the tools returned:"
BASE_62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@record(frozen=True, slots=True)
class Talk:
    """The variant of messages that an endpoint accepts."""

    keep_developer: bool
    """True if it knows the role `developer`; else that is `system`."""
    reasoning: bool
    """True if reasoning that came with tool calls is given back."""
    short_ids: bool
    """True if ids of tool calls must be nine letters and digits."""

    def render(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Return the messages in order; images of tool results follow the results, because those hold text only."""
        rendered: list[dict[str, Any]] = []
        pictures: list[Part] = []
        for message in messages:
            if message.role != "tool" and pictures:
                rendered.append(self._pictures(pictures))
                pictures = []
            rendered.append(self._message(message))
            if message.call_id:
                pictures += [part for part in message.parts if isinstance(part, Image)]
        return [*rendered, self._pictures(pictures)] if pictures else rendered

    def _pictures(self, pictures: list[Part]) -> dict[str, Any]:
        return self._message(Message("user", (Text(PICTURES), *pictures)))

    def _message(self, message: Message) -> dict[str, Any]:
        if message.call_id:
            return {"role": "tool", "tool_call_id": self._id(message.call_id), "content": _text(message)}
        role: str = message.role
        if role == "developer" and not self.keep_developer:
            role = "system"
        if role == "tool":
            role = "user"  # A result without the id of its call can only be sent as text.
        name = {"name": message.name} if message.name else {}
        return {"role": role, "content": _content(message), **name, **self._calls(message)}

    def _calls(self, message: Message) -> dict[str, Any]:
        if not message.calls:
            return {}
        calls = openai_calls(message.calls, self._id)
        if not self.reasoning or message.keepsake is None:
            return {"tool_calls": calls}
        for call, extra in zip(calls, message.keepsake.get("extra_content", ()), strict=False):
            call |= {"extra_content": extra} if extra else {}
        return {"tool_calls": calls, **message.keepsake.get("message", {})}

    def _id(self, id_: str) -> str:
        """Return the id, or one derived from it where the endpoint would refuse it; deterministic."""
        if self.short_ids:
            return id_ if re.fullmatch("[A-Za-z0-9]{9}", id_) else _digest(id_, 9)
        return id_ if len(id_) <= LONGEST_ID else f"call_{_digest(id_, 24)}"


def _digest(text: str, places: int) -> str:
    return "".join(BASE_62[byte % 62] for byte in hashlib.sha256(text.encode()).digest()[:places])


def _content(message: Message) -> str | list[dict[str, Any]] | None:
    """Return one text as a string, several parts as a list, and None for an assistant that only calls tools."""
    text = _text(message)
    if message.calls and not text:
        return None
    if len(message.parts) > 1 or any(isinstance(part, Image) for part in message.parts):
        return [*map(_part, message.parts)]
    return text


def _text(message: Message) -> str:
    """Return `Message.text`, faster: a long conversation is rendered anew for each of its turns."""
    parts = message.parts
    return parts[0].text if len(parts) == 1 and isinstance(parts[0], Text) else message.text


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    detail = {"detail": part.detail} if part.detail else {}
    return {"type": "image_url", "image_url": {"url": part.url, **detail}}


class Reasoning:
    """Reasoning and signatures of a reply, which its server wants back with the turn."""

    __slots__ = ("_details", "_extras", "_texts")

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._details: list[dict[str, Any]] = []
        self._extras: dict[int, Any] = {}

    def said(self, said: Mapping[str, Any]) -> None:
        """Add the reasoning of a delta or of a whole message."""
        for name in ("reasoning_content", "reasoning"):
            if isinstance(text := said.get(name), str) and text:
                self._texts.setdefault(name, []).append(text)
        for detail in said.get("reasoning_details") or ():
            if isinstance(detail, dict):
                self._detail(detail)

    def extra(self, place: int, extra: object) -> None:
        """Add the extra content of one tool call, such as Google's signatures."""
        if extra:
            self._extras[place] = extra

    def keepsake(self, calls: int) -> dict[str, Any]:
        """Return all of it, empty if nothing came. `reasoning_details` replace `reasoning`: they hold more."""
        kept: dict[str, Any] = {}
        if self._details:
            kept["message"] = {"reasoning_details": self._details}
        elif self._texts:
            name, texts = next(iter(self._texts.items()))
            kept["message"] = {name: "".join(texts)}
        if self._extras:
            kept["extra_content"] = [self._extras.get(place) for place in range(calls)]
        return kept

    def _detail(self, detail: dict[str, Any]) -> None:
        """Add a piece of a detail: its pieces follow each other, its texts grow, its other fields come once."""
        last = self._details[-1] if self._details else {}
        if not last or any(last.get(name) != detail.get(name) for name in ("type", "index")) or "data" in detail:
            self._details.append(dict(detail))
            return
        for name, value in detail.items():
            grows = name in ("text", "summary") and isinstance(value, str)
            if grows:
                last[name] = (last.get(name) or "") + value
            elif value is not None:
                last[name] = value
