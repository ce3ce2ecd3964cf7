// openai for Node.
import OpenAI from "openai";
import { MODEL, KEY, QUESTION, SCHEMA, URL_, WEATHER, city, expect, test } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, maxRetries: 0 });
const given = { model: MODEL, max_tokens: 24, messages: [{ role: "user", content: QUESTION }] };
const tool = { name: "rain", description: "Tells the rain.", parameters: SCHEMA, strict: true };
let whole;

await test("chat", async () => {
  whole = await client.chat.completions.create(given);
  expect(whole.choices[0].message.content, whole);
});
await test("stream", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...given, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  expect(text === whole.choices[0].message.content, text);
});
await test("tool", async () => {
  const runner = client.chat.completions.runTools({
    model: MODEL,
    messages: [{ role: "user", content: WEATHER }],
    tools: [{ type: "function", function: {
      ...tool, parse: JSON.parse, function: ({ city }) => `3 mm in ${city}`,
    } }],
  });
  expect(await runner.finalContent(), runner.messages);
  expect(runner.messages.some((one) => one.role === "tool"), runner.messages);
});
await test("structured", async () => {
  const made = await client.chat.completions.parse({
    ...given,
    response_format: {
      type: "json_schema",
      json_schema: { name: "trip", schema: SCHEMA, strict: true },
    },
  });
  city(made.choices[0].message.content);
});
await test("responses", async () => {
  const first = await client.responses.create({ model: MODEL, input: QUESTION });
  let last;
  for await (const event of await client.responses.create({
    model: MODEL, input: "And of Spain?", previous_response_id: first.id, stream: true,
  })) last = event;
  expect(last.response.previous_response_id === first.id, last);
});
await test("responses tool", async () => {
  const tools = [{ type: "function", ...tool }];
  const input = [{ role: "user", content: WEATHER }];
  const called = await client.responses.create({ model: MODEL, input, tools });
  const [call] = called.output.filter((item) => item.type === "function_call");
  city(call.arguments);
  const told = await client.responses.create({
    model: MODEL, tools,
    input: [...input, ...called.output,
      { type: "function_call_output", call_id: call.call_id, output: "3 mm" }],
  });
  expect(told.status, told);
});
