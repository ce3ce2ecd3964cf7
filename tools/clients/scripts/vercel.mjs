// Vercel's AI SDK, with each provider that has a base URL.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";
import { MODEL, KEY, QUESTION, URL_, WEATHER, expect, test } from "./cases.mjs";

const openai = createOpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY });
const models = {
  "openai-compatible": createOpenAICompatible({
    name: "gemmakv", baseURL: `${URL_}/v1`, apiKey: KEY, includeUsage: true,
    supportsStructuredOutputs: true,
  })(MODEL),
  "openai responses": openai(MODEL),
  "openai chat": openai.chat(MODEL),
  anthropic: createAnthropic({ baseURL: `${URL_}/v1`, apiKey: KEY })(MODEL),
};
const trip = z.object({ city: z.enum(["Rome", "Oslo"]) });
const tools = { rain: ai.tool({
  description: "Tells the rain.", inputSchema: trip, execute: ({ city }) => `3 mm in ${city}`,
}) };

for (const [name, model] of Object.entries(models)) {
  const given = { model, prompt: QUESTION, maxOutputTokens: 24, maxRetries: 0 };
  await test(`${name} chat`, async () => {
    const { text } = await ai.generateText(given);
    expect(text, text);
  });
  await test(`${name} stream`, async () => {
    let failed;
    const made = ai.streamText({ ...given, onError: ({ error }) => { failed = error; } });
    let text = "";
    for await (const piece of made.textStream) text += piece;
    if (failed) throw failed;
    expect(text, text);
  });
  await test(`${name} tool`, async () => {
    const stopWhen = (ai.stepCountIs ?? ai.isStepCount)(3);
    const said = await ai.generateText({
      ...given, prompt: WEATHER, maxOutputTokens: 60, tools, stopWhen,
    });
    expect(said.steps.length >= 2, said.steps.map((one) => one.content));
    let failed;
    const made = ai.streamText({
      ...given, prompt: WEATHER, maxOutputTokens: 60, tools, stopWhen,
      onError: ({ error }) => { failed = error; },
    });
    const steps = await made.steps;
    if (failed) throw failed;
    expect(steps.length >= 2, steps.map((one) => one.content));
  });
  await test(`${name} structured`, async () => {
    const said = await ai.generateText({ ...given, output: ai.Output.object({ schema: trip }) });
    expect(["Rome", "Oslo"].includes(said.output.city), said.output);
  });
  await test(`${name} tool, structured`, async () => {
    const said = await ai.generateText({
      ...given, prompt: WEATHER, maxOutputTokens: 60, tools,
      stopWhen: (ai.stepCountIs ?? ai.isStepCount)(3),
      output: ai.Output.object({ schema: trip }),
    });
    expect(["Rome", "Oslo"].includes(said.output.city), said.output);
  });
}
