"""Models of the replies of `/v1/responses`: the response object, its items, and the events of its stream.

They document, as those of `replies.py` do.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator

from app.gateway.openapi.replies import CompletionDetails, PromptDetails, Reply, RunExtension

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseInputDetails(PromptDetails):
    """Parts of the input, and the orchestration's input, which is not part of it."""

    cache_write_tokens: int


class ResponseUsage(Reply):
    """Tokens that the caller can see: total = input + output. With the orchestration's it is the run's sum."""

    input_tokens: int
    input_tokens_details: ResponseInputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class OutputText(Reply):
    """A text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputRefusal(Reply):
    """A refusal in the place of an answer."""

    type: Literal["refusal"]
    refusal: str


OutputPart = Annotated[OutputText | OutputRefusal, Discriminator("type")]


class OutputMessage(Reply):
    """The assistant's message."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputPart]
    phase: Literal["commentary", "final_answer"] | None
    """`commentary` if calls of tools follow; null while they may."""


class FunctionCallItem(Reply):
    """A call of one of the caller's functions."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    """JSON text."""
    status: ItemStatus


class CustomToolCallItem(Reply):
    """A call of one of the caller's custom tools."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ToolSearchCallItem(Reply):
    """A search for deferred tools."""

    type: Literal["tool_search_call"]
    id: str
    call_id: str | None
    status: ItemStatus
    execution: Literal["client", "server"]
    arguments: Any


class ToolSearchOutputItem(Reply):
    """The tools that a search has found."""

    type: Literal["tool_search_output"]
    id: str
    call_id: str | None
    status: ItemStatus
    execution: Literal["client", "server"]
    tools: list[dict[str, Any]]


OutputItem = Annotated[
    OutputMessage | FunctionCallItem | CustomToolCallItem | ToolSearchCallItem | ToolSearchOutputItem,
    Discriminator("type"),
]


class ResponseError(Reply):
    """The reason why a response failed."""

    code: Literal[
        "context_length_exceeded", "insufficient_quota", "invalid_prompt", "rate_limit_exceeded", "server_error"
    ]
    message: str


class IncompleteDetails(Reply):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class ReasoningOptions(Reply):
    """The effort that the request asked for."""

    effort: str | None
    summary: str | None


class ResponseText(Reply):
    """The format of the answer."""

    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"] | None = None
    """The verbosity that the request asked for; absent if it asked for none."""


class ResponseObject(Reply):
    """OpenAI's `response`: one turn of a run."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float | None
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    metadata: dict[str, str]
    baton: RunExtension | None = None
    """Once the response is over."""


class DeletedResponse(Reply):
    """The id of a response that was deleted with its content."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputText(Reply):
    """A text of the conversation."""

    type: Literal["input_text"]
    text: str


class InputImage(Reply):
    """An image of the conversation."""

    type: Literal["input_image"]
    image_url: str
    detail: str
    file_id: None


class InputFile(Reply):
    """A PDF of the conversation."""

    type: Literal["input_file"]
    filename: str
    file_data: str
    file_id: None


class ItemLabels(Reply):
    """The labels that an item of a compacted conversation carries on to the next request."""

    labels: list[str]


class InputMessage(Reply):
    """A message of the conversation."""

    type: Literal["message"]
    id: str
    status: Literal["completed"]
    role: str
    content: list[Annotated[InputText | InputImage | InputFile | OutputText, Discriminator("type")]]
    baton: ItemLabels | None = None


class ToolOutputItem(Reply):
    """The result of a call of one of the caller's tools."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str
    call_id: str
    status: Literal["completed"]
    output: str | list[Annotated[InputText | InputImage | InputFile, Discriminator("type")]]
    """The text, or all parts where images or files are among them."""


class CompactedItem(Reply):
    """Notes of everything in a conversation but the user's messages."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str
    """The notes, encoded."""
    baton: ItemLabels | None = None


InputItem = Annotated[
    InputMessage
    | ToolOutputItem
    | FunctionCallItem
    | CustomToolCallItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | CompactedItem,
    Discriminator("type"),
]


class InputTokens(Reply):
    """An estimate of the tokens of input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(Reply):
    """OpenAI's `response.compaction`: items that the next request sends in the place of the conversation."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Annotated[InputMessage | CompactedItem, Discriminator("type")]]
    usage: ResponseUsage
    baton: RunExtension


class InputItemList(Reply):
    """A page of the items of a request's `input`."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEventBase(Reply):
    """Every event of a response's stream has a number by which the stream can be resumed."""

    sequence_number: int


class ResponseStateEvent(ResponseEventBase):
    """The response was created, is in progress, waits for an approval of its plan (`response.queued`, which ends the
    stream for now), or is over."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.cancelled",
    ]
    response: ResponseObject


class OutputItemEvent(ResponseEventBase):
    """An item was added to the output, or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartPlace(ResponseEventBase):
    """The place of a part of the message."""

    item_id: str
    output_index: int
    content_index: int


class ContentPartEvent(PartPlace):
    """A part was added to the message, or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputPart


class OutputTextDelta(PartPlace):
    """More of the text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[dict[str, Any]]


class OutputTextDone(PartPlace):
    """The whole text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[dict[str, Any]]


class RefusalDelta(PartPlace):
    """More of a refusal."""

    type: Literal["response.refusal.delta"]
    delta: str


class RefusalDone(PartPlace):
    """The whole refusal."""

    type: Literal["response.refusal.done"]
    refusal: str


class ArgumentsDelta(ResponseEventBase):
    """More of a function call's arguments, or a custom tool's whole input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEventBase):
    """A function call's whole arguments."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    arguments: str
    name: str


class CustomInputDone(ResponseEventBase):
    """A custom tool's whole input."""

    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str


class StreamErrorEvent(ResponseEventBase):
    """The stream is broken; it can be resumed behind the event before."""

    type: Literal["error"]
    message: str
    param: str | None
    code: str | None


ResponseEvent = Annotated[
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | RefusalDelta
    | RefusalDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDone
    | StreamErrorEvent,
    Discriminator("type"),
]
