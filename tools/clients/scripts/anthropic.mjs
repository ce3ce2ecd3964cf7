// @anthropic-ai/sdk.
import Anthropic from "@anthropic-ai/sdk";
import { MODEL, KEY, QUESTION, SCHEMA, URL_, WEATHER, city, expect, test } from "./cases.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const given = { model: MODEL, max_tokens: 24, messages: [{ role: "user", content: QUESTION }] };
const tool = { name: "rain", description: "Tells the rain.", input_schema: SCHEMA };
let whole;

await test("chat", async () => {
  whole = await client.messages.create(given);
  expect(whole.content[0].text, whole);
});
await test("stream", async () => {
  const last = await client.messages.stream(given).finalMessage();
  expect(last.content[0].text === whole.content[0].text, last);
});
await test("tool runner", async () => {
  const runner = client.beta.messages.toolRunner({
    model: MODEL, max_tokens: 60,
    messages: [{ role: "user", content: WEATHER }],
    tools: [{ ...tool, run: ({ city }) => `3 mm in ${city}`, parse: (input) => input }],
  });
  const seen = [];
  for await (const message of runner) seen.push(message);
  const read = seen.map(({ usage }) => usage.input_tokens + usage.cache_read_input_tokens
    + usage.cache_creation_input_tokens);
  // The second request has all of the first, or the server has kept it.
  expect(seen.length === 2 && read[1] > read[0], { read, last: seen.at(-1) });
});
await test("structured", async () => {
  const made = await client.messages.create({
    ...given, output_config: { format: { type: "json_schema", schema: SCHEMA } },
  });
  city(made.content[0].text);
});
await test("count tokens", async () => {
  const counted = await client.messages.countTokens({
    model: MODEL, messages: given.messages, tools: [tool],
  });
  expect(counted.input_tokens > 10, counted);
});
