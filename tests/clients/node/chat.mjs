// The same question whole, streamed, and by the stream helper.
import { connect, messages, report } from "./client.mjs";

const client = connect();
const asked = { model: "baton-mini", messages, logprobs: true, top_logprobs: 1 };
const tokensOf = (logprobs) => (logprobs?.content ?? []).map((token) => token.token);

const whole = await client.chat.completions.create(asked);
const streamed = { text: "", finish: null, tokens: [], usage: null };
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  streamed.usage = chunk.usage ?? streamed.usage;
  for (const choice of chunk.choices) {
    streamed.text += choice.delta.content ?? "";
    streamed.finish = choice.finish_reason ?? streamed.finish;
    streamed.tokens.push(...tokensOf(choice.logprobs));
  }
}
const helped = await client.chat.completions.stream(asked).finalChatCompletion();
report({
  text: whole.choices[0].message.content,
  finish: whole.choices[0].finish_reason,
  tokens: tokensOf(whole.choices[0].logprobs),
  usage: whole.usage,
  streamed,
  helped: helped.choices[0].message.content,
});
