// ollama for Node.
import { Ollama } from "ollama";
import { MODEL, KEY, QUESTION, SCHEMA, URL_, WEATHER, city, expect, test } from "./cases.mjs";

const client = new Ollama({ host: URL_, headers: { Authorization: `Bearer ${KEY}` } });
const given = {
  model: MODEL, messages: [{ role: "user", content: QUESTION }], options: { num_predict: 24 },
};
const tools = [{ type: "function", function: {
  name: "rain", description: "Tells the rain.", parameters: SCHEMA,
} }];
let whole;

await test("chat", async () => {
  whole = (await client.chat(given)).message.content;
  expect(whole, whole);
});
await test("stream", async () => {
  let text = "";
  for await (const part of await client.chat({ ...given, stream: true })) {
    text += part.message.content;
  }
  expect(text === whole, text);
});
await test("tool", async () => {
  const messages = [{ role: "user", content: WEATHER }];
  const called = (await client.chat({ model: MODEL, messages, tools })).message;
  expect(called.tool_calls[0].function.arguments.city === "Rome", called);
  messages.push(called, { role: "tool", tool_name: "rain", content: "3 mm" });
  const told = await client.chat({ model: MODEL, messages, tools });
  expect(told.done_reason, told);
});
await test("structured", async () => {
  city((await client.chat({ ...given, format: SCHEMA })).message.content);
});
await test("generate", async () => {
  const made = await client.generate({ model: MODEL, prompt: QUESTION, options: given.options });
  expect(made.response, made);
});
await test("models", async () => {
  expect((await client.list()).models.length, "models");
});
