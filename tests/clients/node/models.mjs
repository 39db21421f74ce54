// The list, and one of it.
import { connect, report } from "./client.mjs";

const client = connect();
const ids = [];
for await (const model of client.models.list()) ids.push(model.id);
report({ ids, one: (await client.models.retrieve("baton-mini")).id });
