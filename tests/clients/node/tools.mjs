// Each choice of tools whole and streamed; then the loop to its end, with the helper's own messages.
import { connect, messages, report } from "./client.mjs";

const client = connect();
const number = { type: "integer" };
const add = {
  name: "add",
  strict: true,
  parameters: {
    type: "object",
    properties: { a: number, b: number },
    required: ["a", "b"],
    additionalProperties: false,
  },
};
const tools = [
  { type: "function", function: add },
  { type: "function", function: { name: "look", parameters: { type: "object" } } },
];
const asked = { model: "baton-mini", messages, tools };
const choices = {
  auto: { tool_choice: "auto" },
  none: { tool_choice: "none" },
  required: { tool_choice: "required" },
  named: { tool_choice: { type: "function", function: { name: "look" } } },
  one: { parallel_tool_calls: false },
};

const isCall = (call) => call.type === "function" && call.id.startsWith("call_bt");

function turn({ choices: [choice], usage }) {
  const calls = (choice.message.tool_calls ?? []).filter(isCall);
  return {
    text: choice.message.content,
    calls: calls.map((call) => [call.function.name, call.function.arguments]),
    finish: choice.finish_reason,
    usage,
  };
}

async function gathered(stream) {
  const said = { text: null, calls: [], finish: null, usage: null, pieces: [], early: null };
  let began = 0;
  for await (const chunk of stream) {
    said.usage = chunk.usage ?? said.usage;
    for (const choice of chunk.choices) {
      if (choice.delta.content) said.text = (said.text ?? "") + choice.delta.content;
      for (const piece of choice.delta.tool_calls ?? []) {
        if (piece.id) {
          said.calls[piece.index] = [piece.function.name, ""];
          said.pieces[piece.index] = 0;
        }
        const more = piece.function.arguments ?? "";
        said.calls[piece.index][1] += more;
        said.pieces[piece.index] += more === "" ? 0 : 1;
        began ||= performance.now();
      }
      said.finish = choice.finish_reason ?? said.finish;
      if (began) said.early = (performance.now() - began) / 1000;
    }
  }
  return said;
}

async function said(body, helps) {
  const { completions } = client.chat;
  const reply = await (helps ? completions.stream(body).finalChatCompletion() : completions.create(body));
  return reply.choices[0].message;
}

async function loop(helps) {
  const talk = [...messages];
  for (;;) {
    const message = await said({ ...asked, messages: talk }, helps);
    if (!message.tool_calls?.length) return message.content;
    talk.push(message);
    for (const call of message.tool_calls) {
      talk.push({ role: "tool", tool_call_id: call.id, content: call.function.name });
    }
  }
}

const results = {};
for (const [name, choice] of Object.entries(choices)) {
  const streaming = { stream: true, stream_options: { include_usage: true } };
  results[name] = {
    whole: turn(await client.chat.completions.create({ ...asked, ...choice })),
    streamed: await gathered(await client.chat.completions.create({ ...asked, ...choice, ...streaming })),
  };
}
results.loop = await loop(false);
results["helped loop"] = await loop(true);
report(results);
