// Responses: whole, streamed, by the stream helper, in the background, with tools, parsed, refused.
import { makeParseableTextFormat } from "openai/lib/parser";
import { connect, raised, report } from "./client.mjs";

const client = connect();
const asked = { model: "baton-mini", input: "What is 2 + 2?" };
const usageOf = ({ usage }) => [usage.input_tokens, usage.output_tokens, usage.total_tokens];

const whole = await client.responses.create(asked);
const kinds = [];
let text = "";
let last;
for await (const event of await client.responses.create({ ...asked, stream: true })) {
  if (event.type !== kinds.at(-1)) kinds.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
  last = event;
}
const helped = await client.responses.stream(asked).finalResponse();

const begun = await client.responses.create({ ...asked, background: true });
let polled = begun;
while (["queued", "in_progress"].includes(polled.status)) {
  await new Promise((wake) => setTimeout(wake, 20));
  polled = await client.responses.retrieve(begun.id);
}
const resumed = [];
for await (const event of await client.responses.retrieve(begun.id, { stream: true, starting_after: 3 })) {
  resumed.push(event.sequence_number);
}

const add = { type: "function", name: "add", strict: false, parameters: { type: "object", properties: {} } };
const first = await client.responses.stream({ ...asked, tools: [add] }).finalResponse();
const call = first.output.find((item) => item.type === "function_call");
const second = await client.responses.create({
  model: asked.model,
  previous_response_id: first.id,
  input: [{ type: "function_call_output", call_id: call.call_id, output: "4" }],
  tools: [add],
});
const listed = [];
for await (const item of client.responses.inputItems.list(second.id)) listed.push(item.type);

const schema = {
  type: "object",
  properties: { x: { type: "integer" } },
  required: ["x"],
  additionalProperties: false,
};
const format = makeParseableTextFormat({ type: "json_schema", name: "point", strict: true, schema }, JSON.parse);
const parsed = await client.responses.parse({ ...asked, text: { format } });
await client.responses.delete(whole.id);

report({
  text: whole.output_text,
  usage: usageOf(whole),
  streamed: { text, kinds, usage: usageOf(last.response) },
  helped: helped.output_text,
  background: {
    begun: ["queued", "in_progress"].includes(begun.status),
    ended: polled.status,
    text: polled.output_text,
    resumed: resumed.length > 0 && resumed.every((number, place) => number > (resumed[place - 1] ?? 3)),
  },
  tools: { name: call.name, arguments: call.arguments, text: second.output_text, listed },
  parsed: parsed.output_parsed,
  deleted: await raised(() => client.responses.retrieve(whole.id)),
  unknown: await raised(() => client.responses.create({ ...asked, foo: 1 })),
  failed: await raised(() => client.responses.create({ ...asked, model: "baton-broken" })),
});
