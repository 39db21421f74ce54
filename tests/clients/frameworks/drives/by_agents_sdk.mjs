// OpenAI's Agents SDK in JavaScript over both of its models: tools, handoffs, outputs with a type, sessions, streams.
import {
  Agent,
  MemorySession,
  OpenAIChatCompletionsModel,
  OpenAIResponsesModel,
  Runner,
  setTracingDisabled,
  tool,
  toolSearchTool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, V1, clock, tell, reportOf, weather } from "./report.mjs";

setTracingDisabled(true);
const PLACE = z.object({ city: z.string(), degrees: z.number().int(), note: z.string().nullable() });
const [CITY, ZONE] = [z.object({ city: z.string() }), z.object({ zone: z.string() })];
const WEATHER = { name: "weather", description: "Tells the weather.", parameters: CITY, execute: weather };
const TOOLS = [
  tool(WEATHER),
  tool({ name: "clock", description: "Tells the time.", parameters: ZONE, execute: clock }),
];
const SEE = [
  { type: "input_text", text: "see" },
  { type: "input_image", image: `data:image/png;base64,${PIXEL}` },
];
const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const ROUTES = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel };

const drive = (Model, stored) => {
  const runner = new Runner({ tracingDisabled: true });
  const agent = (tier = MINI, more = {}) =>
    new Agent({ name: "Asker", instructions: "Be brief.", model: new Model(client, tier), ...more });
  const run = async (said, tier = MINI, more = {}) => (await runner.run(agent(tier, more), said)).finalOutput;
  const streamed = async (made, said) => {
    let words = "";
    const ran = await runner.run(made, said, { stream: true });
    for await (const piece of ran.toTextStream()) words += piece;
    await ran.completed;
    return [ran.finalOutput, words, ran.state.usage.totalTokens];
  };
  const remembered = async () => {
    const session = new MemorySession();
    await runner.run(agent(MINI, { tools: TOOLS }), "weather one", { session });
    return (await runner.run(agent(MINI, { tools: TOOLS }), "two", { session })).finalOutput;
  };
  const followedUp = async () => {
    const first = await runner.run(agent(MINI, { tools: TOOLS }), "weather one");
    return (await runner.run(agent(), "two", { previousResponseId: first.lastResponseId })).finalOutput;
  };
  const handedOver = async () => {
    const other = agent(MINI, { name: "Other", tools: TOOLS });
    const ended = await runner.run(agent(MINI, { handoffs: [other] }), "transfer_to_Other: weather");
    return [ended.lastAgent.name, typeof ended.finalOutput];
  };

  const found = async (how) => {
    const tools = [tool({ ...WEATHER, deferLoading: true }), toolSearchTool(how)];
    const said = "tool_search weather";
    return [await run(said, MINI, { tools }), (await streamed(agent(MINI, { tools }), said))[0]];
  };
  const newer = { "followed up": followedUp, found, "found by itself": () => found({ execution: "client" }) };

  return reportOf({
    text: () => run("Hi"),
    ultra: () => run("Hi", ULTRA),
    streamed: () => streamed(agent(), "Hi"),
    usage: async () => (await runner.run(agent(), "Hi")).state.usage.totalTokens,
    tools: () => run("weather clock", MINI, { tools: TOOLS }),
    "tools streamed": () => streamed(agent(MINI, { tools: TOOLS }), "weather clock"),
    "tools over a workflow": () => run("weather clock", ULTRA, { tools: TOOLS }),
    memory: remembered,
    object: () => run("Where?", MINI, { outputType: PLACE }),
    "object streamed": () => streamed(agent(MINI, { outputType: PLACE }), "Where?"),
    "object behind tools": () => run("weather", MINI, { tools: TOOLS, outputType: PLACE }),
    handoff: handedOver,
    image: () => run([{ role: "user", content: SEE }]),
    unknown: () => run("Hi", NOTHING),
    broken: async () => (await streamed(agent(BROKEN), "Hi"))[0],
    ...(stored ? newer : {}),
  });
};

const report = {};
for (const [route, Model] of Object.entries(ROUTES)) report[route] = await drive(Model, route === "responses");
tell(report);
