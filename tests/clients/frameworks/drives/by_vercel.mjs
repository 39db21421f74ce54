// Vercel's AI SDK over four of its models: OpenAI's on both routes, that for servers like OpenAI's, and Anthropic's.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, ToolLoopAgent, generateObject, generateText, isStepCount, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { BROKEN, KEY, MINI, NOTHING, PIXEL, ULTRA, V1, clock, tell, reportOf, weather } from "./report.mjs";

const PLACE = z.object({ city: z.string(), degrees: z.int(), note: z.string().nullable() });
const TOOLS = {
  weather: tool({ description: "Tells the weather.", inputSchema: z.object({ city: z.string() }), execute: weather }),
  clock: tool({ description: "Tells the time.", inputSchema: z.object({ zone: z.string() }), execute: clock }),
};
const STEPS = { tools: TOOLS, stopWhen: isStepCount(5) };
const where = { baseURL: V1, apiKey: KEY };
const openai = createOpenAI(where);
const ROUTES = {
  chat: openai.chat,
  responses: openai.responses,
  like: createOpenAICompatible({ ...where, name: "baton", includeUsage: true, supportsStructuredOutputs: true }),
  messages: createAnthropic(where).messages,
};

const drive = (model) => {
  const asked = (prompt, tier = MINI) => ({ model: model(tier), prompt, instructions: "Be brief.", maxRetries: 0 });
  const whole = async (options) => (await generateText(options)).text;
  // Errors are parts of a stream, not raised by it.
  const streamed = async (options, of = (run) => run.textStream) => {
    let failed, last, words = "";
    const run = streamText({ ...options, onError: ({ error }) => (failed = error) });
    for await (const piece of of(run)) typeof piece === "string" ? (words += piece) : (last = piece);
    if (failed) throw failed;
    return [words, last, (await run.finalStep).usage.totalTokens];
  };

  const remembered = async () => {
    const messages = [{ role: "user", content: "weather one" }];
    const first = await generateText({ model: model(MINI), messages, ...STEPS, maxRetries: 0 });
    messages.push(...first.responseMessages, { role: "user", content: "two" });
    return whole({ model: model(MINI), messages, ...STEPS, maxRetries: 0 });
  };
  const forced = async () => {
    const said = await generateText({ ...asked("Hi"), tools: TOOLS, toolChoice: { type: "tool", toolName: "weather" } });
    return said.toolCalls.map((call) => [call.toolName, call.input]);
  };
  const agent = async () => {
    const made = new ToolLoopAgent({ model: model(MINI), instructions: "Be brief.", ...STEPS, maxRetries: 0 });
    return (await made.generate({ prompt: "weather clock" })).text;
  };
  const usage = async () => [(await generateText(asked("Hi"))).usage.totalTokens, (await streamed(asked("Hi")))[2]];
  const output = Output.object({ schema: PLACE });
  const image = { type: "file", data: Buffer.from(PIXEL, "base64"), mediaType: "image/png" };
  const seen = [{ role: "user", content: [{ type: "text", text: "see" }, image] }];

  return reportOf({
    text: () => whole(asked("Hi")),
    ultra: () => whole(asked("Hi", ULTRA)),
    streamed: async () => (await streamed(asked("Hi")))[0],
    usage,
    tools: () => whole({ ...asked("weather clock"), ...STEPS }),
    "tools streamed": async () => (await streamed({ ...asked("weather clock"), ...STEPS }))[0],
    "tools over a workflow": () => whole({ ...asked("weather clock", ULTRA), ...STEPS }),
    "tools of an agent": agent,
    memory: remembered,
    forced,
    object: async () => (await generateText({ ...asked("Where?"), output })).output,
    "object streamed": async () => (await streamed({ ...asked("Where?"), output }, (run) => run.partialOutputStream))[1],
    "object behind tools": async () => (await generateText({ ...asked("weather"), ...STEPS, output })).output,
    "object of old": async () => (await generateObject({ ...asked("Where?"), schema: PLACE })).object,
    "object of old, streamed": async () => {
      const run = streamObject({ ...asked("Where?"), schema: PLACE });
      for await (const _ of run.partialObjectStream);
      return run.object;
    },
    choice: async () => {
      const output = Output.choice({ options: ["Oslo", "Rome"] });
      return (await generateText({ ...asked("Where?"), output })).output;
    },
    image: () => whole({ ...asked(), prompt: undefined, messages: seen }),
    unknown: () => whole(asked("Hi", NOTHING)),
    broken: async () => (await streamed(asked("Hi", BROKEN)))[0],
  });
};

// A deferred tool, found by a search of the server's, and by one of its own, which says what it found.
const found = async (search) => {
  const weather = { ...TOOLS.weather, providerOptions: { openai: { deferLoading: true } } };
  const asked = { model: openai(MINI), prompt: "tool_search weather", tools: { search, weather }, maxRetries: 0 };
  const options = { ...asked, stopWhen: isStepCount(5) };
  return [(await generateText(options)).text, await streamText(options).text];
};
const CITY = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const WEATHER = { type: "function", name: "weather", parameters: CITY, strict: true, defer_loading: true };
const parameters = { type: "object", properties: { goal: { type: "string" } }, required: ["goal"] };
const search = openai.tools.toolSearch({ execution: "client", description: "Finds tools.", parameters });
const searched = {
  found: () => found(openai.tools.toolSearch()),
  "found by itself": () => found({ ...search, execute: async () => ({ tools: [WEATHER] }) }),
};

const report = {};
for (const [route, model] of Object.entries(ROUTES)) report[route] = await drive(model);
Object.assign(report.responses, await reportOf(searched));
tell(report);
