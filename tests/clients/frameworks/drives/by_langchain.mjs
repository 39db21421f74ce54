// LangChain in JavaScript: `ChatOpenAI` on both of OpenAI's routes, `ChatAnthropic`, and an agent of its over each.
import { ChatAnthropic } from "@langchain/anthropic";
import { MemorySaver } from "@langchain/langgraph";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, providerStrategy, tool } from "langchain";
import { z } from "zod";
import { BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, URL, V1, clock, tell, reportOf, weather } from "./report.mjs";

const PLACE = z.object({ city: z.string(), degrees: z.int(), note: z.string().nullable() });
const TOOLS = [
  tool(weather, { name: "weather", description: "Tells the weather.", schema: z.object({ city: z.string() }) }),
  tool(clock, { name: "clock", description: "Tells the time.", schema: z.object({ zone: z.string() }) }),
];
const SEE = [
  { type: "text", text: "see" },
  { type: "image_url", image_url: { url: `data:image/png;base64,${PIXEL}` } },
];
const openai = { apiKey: KEY, configuration: { baseURL: V1 }, maxRetries: 0 };
const ROUTES = {
  chat: (model) => new ChatOpenAI({ model, ...openai }),
  responses: (model) => new ChatOpenAI({ model, ...openai, useResponsesApi: true }),
  messages: (model) => new ChatAnthropic({ model, apiKey: KEY, anthropicApiUrl: URL, maxRetries: 0 }),
};

const drive = (make) => {
  const model = make(MINI);
  const text = async (said, tier = MINI) => (await make(tier).invoke(said)).text;
  const streamed = async (tier = MINI) => {
    let whole;
    for await (const piece of await make(tier).stream("Hi")) whole = whole ? whole.concat(piece) : piece;
    return whole;
  };
  const usage = async () =>
    [await model.invoke("Hi"), await streamed()].map((said) => said.usage_metadata.total_tokens);
  const agent = async (tier, ...words) => {
    const made = createAgent({ model: make(tier), tools: TOOLS, checkpointer: new MemorySaver() });
    let last;
    for (const content of words)
      last = await made.invoke({ messages: [{ role: "user", content }] }, { configurable: { thread_id: "1" } });
    return last.messages.at(-1).text;
  };
  const agentStreamed = async () => {
    const made = createAgent({ model, tools: TOOLS });
    const asked = { messages: [{ role: "user", content: "weather clock" }] };
    let words = "";
    for await (const [piece] of await made.stream(asked, { streamMode: "messages" }))
      if (piece.getType() === "ai") words += piece.text;
    return words;
  };
  const forced = async () => {
    const said = await model.bindTools(TOOLS, { tool_choice: "weather" }).invoke("Hi");
    return said.tool_calls.map((call) => [call.name, call.args]);
  };
  const object = (method) => model.withStructuredOutput(PLACE, { name: "place", method }).invoke("Where?");
  const ofAgent = async () => {
    const made = createAgent({ model, tools: TOOLS, responseFormat: providerStrategy(PLACE) });
    return (await made.invoke({ messages: [{ role: "user", content: "weather" }] })).structuredResponse;
  };

  return reportOf({
    text: () => text("Hi"),
    ultra: () => text("Hi", ULTRA),
    streamed: async () => (await streamed()).text,
    usage,
    tools: () => agent(MINI, "weather clock"),
    "tools streamed": agentStreamed,
    "tools over a workflow": () => agent(ULTRA, "weather clock"),
    memory: () => agent(MINI, "weather one", "two"),
    forced,
    object: () => object("jsonSchema"),
    "object by tools": () => object("functionCalling"),
    "object of an agent": ofAgent,
    image: () => text([{ role: "user", content: SEE }]),
    unknown: () => text("Hi", NOTHING),
    broken: async () => (await streamed(BROKEN)).text,
  });
};

const report = {};
for (const [route, make] of Object.entries(ROUTES)) report[route] = await drive(make);
tell(report);
