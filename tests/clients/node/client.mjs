// What all programs of this folder share: a client for the service under test, and how a report is written.
import OpenAI from "openai";

export const messages = [{ role: "user", content: "What is 2 + 2?" }];

export function connect(options = {}) {
  const { BATON_URL: baseURL, BATON_API_KEY: apiKey } = process.env;
  return new OpenAI({ baseURL: `${baseURL}/v1`, apiKey, maxRetries: 0, ...options });
}

export function report(value) {
  process.stdout.write(JSON.stringify(value));
}

export async function raised(call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    return {
      class: error.constructor.name,
      status: error.status ?? null,
      type: error.type ?? null,
      code: error.code ?? null,
      param: error.param ?? null,
      request: error.status === undefined ? null : Boolean(error.requestID),
    };
  }
  throw new Error("nothing was raised");
}
