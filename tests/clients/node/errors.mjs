// What the client throws, before the first byte and after it.
import { connect, messages, raised, report } from "./client.mjs";

const client = connect();
const stranger = connect({ apiKey: "sk-wrong" });
const ask = (body) => client.chat.completions.create(body);
report({
  model: await raised(() => ask({ model: "nothing", messages })),
  value: await raised(() => ask({ model: "baton-mini", messages: [] })),
  unknown: await raised(() => ask({ model: "baton-mini", messages, foo: 1 })),
  key: await raised(() => stranger.models.list()),
  route: await raised(() => client.embeddings.create({ model: "baton-mini", input: "x" })),
  failed: await raised(() => ask({ model: "baton-broken", messages })),
  stream: await raised(async () => {
    for await (const _ of await ask({ model: "baton-broken", messages, stream: true }));
  }),
});
