"""Refusals of Gemini's generateContent, in its words (Source: the client's types, observed errors)."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from .rules import is_int, names, within
from .wire import ProviderRefusal

FIELDS = names(
    "cachedContent contents generationConfig model safetySettings serviceTier store systemInstruction toolConfig tools"
)
CONFIG = names(
    "audioTimestamp candidateCount enableAffectiveDialog enableEnhancedCivicAnswers frequencyPenalty "
    "imageConfig logprobs "
    "maxOutputTokens mediaResolution presencePenalty responseFormat responseJsonSchema responseLogprobs "
    "responseMimeType "
    "responseModalities responseSchema routingConfig seed speechConfig stopSequences temperature thinkingConfig "
    "topK topP"
)
DATA = names(
    "codeExecutionResult executableCode fileData functionCall functionResponse inlineData text toolCall toolResponse"
)
META = names("mediaProcessing mediaResolution partMetadata thought thoughtSignature videoMetadata")
TOOL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.:-]{0,127}")


def camel(value: Any) -> Any:
    """Field names in lowerCamelCase: protobuf's JSON takes both spellings. Schemas and arguments stay as they are."""
    free = ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")
    if isinstance(value, list):
        return [camel(item) for item in value]
    if not isinstance(value, dict):
        return value
    camel_names = {re.sub(r"_([a-z])", lambda m: m[1].upper(), name): item for name, item in value.items()}
    return {name: item if name in free else camel(item) for name, item in camel_names.items()}


def refuse(message: str, field: str = "") -> NoReturn:
    """Raise the 400 with the field violation."""
    violation = {"description": message, **({"field": field} if field else {})}
    detail = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}
    raise ProviderRefusal(400, message, details=[detail])


def check(body: dict[str, Any]) -> None:
    """Raise ProviderRefusal unless the real API would take that body (already in camelCase)."""
    _refuse_unknown(body, FIELDS, "")
    config = body.get("generationConfig") or {}
    _refuse_unknown(config, CONFIG, "generation_config")
    contents = body.get("contents")
    if not contents:
        refuse("* GenerateContentRequest.contents: contents is not specified\n", "contents")
    if not isinstance(contents, list):
        refuse("Invalid JSON payload received. 'contents' must be a list.", "contents")
    for i, content in enumerate(contents):
        _check_content(content, i)
    if len(contents) == 1 and contents[0].get("role", "user") != "user":
        refuse("Please ensure that single turn requests end with a user role or the role field is empty.")
    _check_calls(contents)
    _check_config(config)
    _check_tools(body.get("tools") or [])
    _check_choice(body)
    if not (body.get("systemInstruction") or {"parts": 1}).get("parts"):
        refuse("* GenerateContentRequest.system_instruction.parts: system_instruction.parts must not be empty.\n")


def _refuse_unknown(names: dict[str, Any], fields: frozenset[str], where: str) -> None:
    for name in names:
        if name not in fields:
            at = f" at '{where}'" if where else ""
            refuse(f'Invalid JSON payload received. Unknown name "{name}"{at}: Cannot find field.', where)


def _check_content(content: dict[str, Any], i: int) -> None:
    _refuse_unknown(content, frozenset(("role", "parts")), f"contents[{i}]")
    if content.get("role", "user") not in ("user", "model", "function"):
        refuse("Please use a valid role: user, model.")
    if not content.get("parts"):
        refuse(
            f"* GenerateContentRequest.contents[{i}].parts: contents.parts must not be empty.\n", f"contents[{i}].parts"
        )
    for k, part in enumerate(content["parts"]):
        where = f"contents[{i}].parts[{k}]"
        _refuse_unknown(part, DATA | META, where)
        if len(DATA & part.keys()) != 1:
            refuse(
                f"* GenerateContentRequest.{where}.data: required oneof field 'data' must have one initialized field\n"
            )
        if "inlineData" in part and not {"mimeType", "data"} <= part["inlineData"].keys():
            refuse(f"* GenerateContentRequest.{where}.inline_data: mime_type and data are required\n")


def _check_calls(contents: list[dict[str, Any]]) -> None:
    before: dict[str, Any] = {"role": "user", "parts": []}
    for content in contents:
        calls = sum("functionCall" in part for part in before["parts"])
        results = sum("functionResponse" in part for part in content["parts"])
        if calls != results:
            refuse(
                "Please ensure that the number of function response parts is equal to the number of function call "
                "parts of "
                "the function call turn."
            )
        if any("functionCall" in part for part in content["parts"]) and before.get("role", "user") == "model":
            refuse(
                "Please ensure that function call turn comes immediately after a user turn or after a function "
                "response turn."
            )
        before = content


def check_signatures(contents: list[dict[str, Any]]) -> None:
    """Gemini 3 and later want a signature at the first call of each turn (Source: "Thought signatures")."""
    for i, content in enumerate(contents):
        calls = [part for part in content["parts"] if "functionCall" in part]
        if calls and not calls[0].get("thoughtSignature"):
            name = calls[0]["functionCall"].get("name")
            refuse(
                f"Function call is missing a thought_signature in functionCall parts. This is required for tools to "
                f"work correctly. Additional data, function call `{name}`, position {i}."
            )


def check_form_beside_tools(body: dict[str, Any]) -> None:
    """Models before Gemini 3 take no form of the answer beside functions."""
    kind = (body.get("generationConfig") or {}).get("responseMimeType", "text/plain")
    if body.get("tools") and kind != "text/plain":
        refuse(f"Function calling with a response mime type: '{kind}' is unsupported")


def _check_choice(body: dict[str, Any]) -> None:
    config = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    if config.get("mode", "AUTO") not in ("AUTO", "ANY", "NONE", "VALIDATED"):
        refuse("Invalid value at 'tool_config.function_calling_config.mode'")
    offered = [f["name"] for tool in body.get("tools") or [] for f in tool.get("functionDeclarations") or []]
    if set(config.get("allowedFunctionNames") or ()) - set(offered):
        refuse("allowed_function_names should be a subset of function declarations' names.")
    if config.get("allowedFunctionNames") and config.get("mode") != "ANY":
        refuse("Function calling mode must be ANY to set allowed_function_names.")


def _check_config(config: dict[str, Any]) -> None:
    if not within(config.get("temperature"), 0, 2):
        refuse("* GenerateContentRequest.generation_config.temperature: temperature must be in the range [0.0, 2.0].\n")
    if not within(config.get("topP"), 0, 1):
        refuse("* GenerateContentRequest.generation_config.top_p: top_p must be in the range [0.0, 1.0].\n")
    limit = config.get("maxOutputTokens")
    if limit is not None and (not is_int(limit) or limit < 1):
        refuse("* GenerateContentRequest.generation_config.max_output_tokens: max_output_tokens must be positive.\n")
    if len(config.get("stopSequences") or []) > 5:
        refuse("* GenerateContentRequest.generation_config.stop_sequences: at most 5 stop sequences are allowed.\n")
    seed = config.get("seed")
    if seed is not None and not -(1 << 31) <= seed < 1 << 31:
        refuse(f"Invalid value at 'generation_config.seed' (TYPE_INT32), {seed}", "generation_config.seed")
    wants_schema = config.get("responseSchema") or config.get("responseJsonSchema")
    if wants_schema and config.get("responseMimeType") not in ("application/json", "text/x.enum"):
        refuse(
            "Unable to submit request because it must have a response mime type of application/json when a "
            "response "
            "schema is set."
        )


def _check_tools(tools: list[dict[str, Any]]) -> None:
    for i, tool in enumerate(tools):
        for k, function in enumerate(tool.get("functionDeclarations") or []):
            if not function.get("description"):
                refuse(f"* GenerateContentRequest.tools[{i}].function_declarations[{k}].description: is required.\n")
            if not TOOL_NAME.fullmatch(str(function.get("name", ""))):
                where = f"tools[{i}].function_declarations[{k}].name"
                refuse(
                    f"* GenerateContentRequest.{where}: Invalid function name. Must start with a letter or an "
                    "underscore.\n"
                )
