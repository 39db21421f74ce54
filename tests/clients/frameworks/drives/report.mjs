// What all programs share: where the service is, what is asked of it, and how a report is told.
import { readFileSync } from "node:fs";

export const [URL, KEY] = [process.env.BATON_URL, process.env.BATON_API_KEY];
export const V1 = `${URL}/v1`;
export const [MINI, ULTRA, NOTHING, BROKEN] = ["baton-mini", "baton-ultra", "nothing", "baton-broken"];
export const PIXEL = readFileSync(new globalThis.URL("report.py", import.meta.url), "utf8").match(/"(iVBOR[^"]+)"/)[1];

export const weather = ({ city }) => `Sunny in ${city}.`;
export const clock = ({ zone }) => `Noon in ${zone}.`;

/** What came of each case; of one that failed, the error. */
export async function reportOf(cases) {
  const report = {};
  for (const [name, made] of Object.entries(cases)) {
    try {
      report[name] = (await made()) ?? null;
    } catch (error) {
      report[name] = { error: error.constructor.name, says: String(error.message).slice(0, 400) };
    }
  }
  return report;
}

/** Print the report, the last line of the output. */
export const tell = (report) => process.stdout.write(`\n${JSON.stringify(report)}\n`);
