// Calls of free text whole, streamed and by the stream helper, and their results.
import { connect, messages, report } from "./client.mjs";

const client = connect();
const tools = [
  { type: "custom", custom: { name: "patch" } },
  { type: "function", function: { name: "look", parameters: { type: "object" } } },
];
const asked = { model: "baton-mini", messages, tools };
const { completions } = client.chat;

function written(call) {
  if (!call.id.startsWith("call_bt")) throw new Error(call.id);
  const said = call.type === "custom" ? call.custom : call.function;
  return [call.type, said.name, said.input ?? said.arguments];
}

const [whole] = (await completions.create(asked)).choices;
const streamed = [];
for await (const chunk of await completions.create({ ...asked, stream: true })) {
  for (const { index, id, type, custom, function: called } of chunk.choices[0]?.delta.tool_calls ?? []) {
    if (id) streamed[index] = [type, "", ""];
    const more = custom ?? called;
    streamed[index][1] += more.name ?? "";
    streamed[index][2] += more.input ?? more.arguments ?? "";
  }
}
const helped = (await completions.stream(asked).finalChatCompletion()).choices[0].message;
if (JSON.stringify(helped.tool_calls.map(written)) !== JSON.stringify(streamed)) throw new Error("helped otherwise");
const results = helped.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.type }));
const last = await completions.create({ ...asked, messages: [...messages, helped, ...results] });
report({ whole: whole.message.tool_calls.map(written), streamed, last: last.choices[0].message.content });
