"""The tools of `POST /v1/messages`, and which of them are on offer."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Struct
from pydantic import Discriminator, Field, StringConstraints, Tag

from app.core.message.chat import NO_TOOLS, Tool, Toolbox
from app.errors import InvalidRequest
from app.gateway.wire.parameters import MOST_TOOLS, ToolText, WireModel
from app.gateway.wire.response_formats import check_parameters
from app.gateway.wire.tool_names import short_name

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
"""The name of a tool, as Anthropic allows it. Workers get a `short_name`."""
CHOICES: Final[Mapping[str, Literal["auto", "none", "required", "named"]]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}
TEXT: Final = {"type": "string"}
LINE: Final = {"type": "integer", "minimum": 0}
EDITS: Final[Mapping[str, Any]] = {
    "path": {"type": "string", "description": "The absolute path of the file or folder."},
    "view_range": {"type": "array", "items": {"type": "integer"}, "description": "First and last line to view."},
    "file_text": {"type": "string", "description": "The content of the file to create."},
    "old_str": {"type": "string", "description": "The text to replace, which must occur exactly once."},
    "new_str": {"type": "string", "description": "The text that replaces it."},
    "insert_line": LINE | {"description": "The number of the line behind which text is inserted; 0: at the start."},
    "insert_text": {"type": "string", "description": "The text to insert."},
}
"""Arguments of the commands view, create, str_replace and insert."""


class ToolDescription(Struct, frozen=True):
    """Anthropic's description of a tool."""

    name: str
    description: str
    schema: dict[str, Any]


def _commands(*names: str, **arguments: Any) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **arguments}, "required": ["command"]}


EDITING: Final = "Views and edits text files by commands."
EDITOR: Final = ToolDescription(
    "str_replace_based_edit_tool", EDITING, _commands("view", "create", "str_replace", "insert", **EDITS)
)
KNOWN: Final[Mapping[str, ToolDescription]] = {
    "bash_20250124": ToolDescription(
        "bash",
        "Runs a command in a bash session, which keeps its state between calls. `restart` begins a new session.",
        {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor_20250124": ToolDescription(
        "str_replace_editor", EDITING, _commands("view", "create", "str_replace", "insert", "undo_edit", **EDITS)
    ),
    "text_editor_20250429": EDITOR,
    "text_editor_20250728": EDITOR,
    "memory_20250818": ToolDescription(
        "memory",
        "Keeps notes in files under /memories from one conversation to the next, by commands. View that folder first.",
        _commands(
            *("view", "create", "str_replace", "insert", "delete", "rename"), **EDITS, old_path=TEXT, new_path=TEXT
        ),
    ),
}
"""By type: the tools of Anthropic's that the caller's side runs ("Bash tool", "Text editor tool", "Memory tool")."""


class CacheMark(WireModel):
    """The end of a prefix that a provider might cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Claude Code says who else may use the cache."""


class WireTool(WireModel):
    """A function of the caller's."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: ToolText | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheMark | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None


class KnownTool(WireModel):
    """A tool that Anthropic describes and the caller's side runs: workers get it as a function of that description."""

    type: Literal[
        "bash_20250124",
        "text_editor_20250124",
        "text_editor_20250429",
        "text_editor_20250728",
        "memory_20250818",
    ]
    name: ToolName
    strict: bool | None = None
    cache_control: CacheMark | None = None
    max_characters: Annotated[int, Field(ge=1)] | None = None
    """Of a file that the caller's side shows; it is for that side to keep."""
    input_examples: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None

    @property
    def description(self) -> str:
        """Return the description of this tool that workers are given."""
        return KNOWN[self.type].description

    @property
    def input_schema(self) -> dict[str, Any]:
        """Return the schema of its arguments."""
        return KNOWN[self.type].schema


def _tag_of(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind in KNOWN:
        return "known"
    return "custom"


AnyTool = Annotated[
    Annotated[WireTool, Tag("custom")] | Annotated[KnownTool, Tag("known")],
    Discriminator(_tag_of),
]


class ToolChoice(WireModel):
    """The tools that the worker must or may use."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


def toolbox_of(
    requested: Sequence[WireTool | KnownTool], choice: ToolChoice | None, references: Iterable[tuple[str, str]]
) -> Toolbox:
    """Return the tools on offer and how they are to be used; `references` are the tools that results refer to, each
    with its place.

    A deferred tool is offered once a result has referred to it, or where it must be called. Where all would be more
    than `MOST_TOOLS`, those that were referred to first give way. Raises `InvalidRequest`.
    """
    if not requested:
        allow(choice is None or choice.type in ("auto", "none"), "tool_choice", "there are no tools to choose from")
        return NO_TOOLS
    names = [tool.name for tool in requested]
    allow(len(set(names)) == len(names), "tools", "two tools have the same name")
    for place, tool in enumerate(requested):
        if isinstance(tool, KnownTool):
            name = KNOWN[tool.type].name
            allow(tool.name == name, f"tools[{place}].name", f"a tool of this type has the name '{name}'")
        check_parameters(tool.input_schema, f"tools[{place}].input_schema")
    chosen_name = ""
    if choice is not None and choice.type == "tool":
        chosen_name = choice.name or ""
    always = {tool.name for tool in requested if not tool.defer_loading or tool.name == chosen_name}
    found_names: dict[str, None] = {}
    for name, where in references:
        allow(name in names, where, "it refers to a tool that is not among tools")
        found_names.pop(name, None)
        if name not in always:
            found_names[name] = None
    allow(len(always) <= MOST_TOOLS, "tools", f"at most {MOST_TOOLS} of them may be on offer at once; defer some")
    surplus = max(len(always) + len(found_names) - MOST_TOOLS, 0)
    offered = always.union(list(found_names)[surplus:])
    tools: list[Tool] = []
    for tool in requested:
        if tool.name in offered:
            tools.append(Tool(short_name(tool.name), tool.description or "", tool.input_schema, tool.strict or False))
    allow(bool(tools), "tools", "one of them at least must not be deferred")
    if choice is None:
        return Toolbox(tuple(tools))
    allow(choice.type != "tool" or chosen_name in names, "tool_choice.name", "it names none of the tools")
    return Toolbox(tuple(tools), CHOICES[choice.type], short_name(chosen_name), not choice.disable_parallel_tool_use)


def long_names(requested: Iterable[WireTool | KnownTool]) -> dict[str, str]:
    """Return the names that workers know by shorter ones, by those."""
    return {short_name(tool.name): tool.name for tool in requested if short_name(tool.name) != tool.name}


def allow(allowed: bool, param: str, reason: str) -> None:
    """Raise `InvalidRequest` with the reason, unless the value of a field is allowed."""
    if not allowed:
        raise InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")
