// Vercel's AI SDK, unmodified: text, streams, tools and objects by @ai-sdk/openai-compatible, openai and anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as ai from "ai";
import { z } from "zod";

const [url, name, way] = process.argv.slice(2);
const isScripted = way === "scripted";
const ANSWER = "A penstock carries water to a turbine.";
const QUESTION = "[play:plain] What is a penstock? Answer in one sentence.";
const Person = z.object({ name: z.string(), age: z.number() });

const apiKey = "none";
const compatible = createOpenAICompatible({
  name: "penstock",
  baseURL: `${url}/v1`,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const models = {
  "openai-compatible": compatible(name),
  "openai, chat": openai.chat(name),
  "openai, responses": openai.responses(name),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey })(name),
};

function check(holds, seen) {
  if (!holds) throw new Error(`wrong: ${JSON.stringify(seen)}`);
}

async function step(did, only, run) {
  if (only && only !== way) return;
  let seen, right = true;
  try {
    seen = await run();
  } catch (error) {
    console.error(error);
    [seen, right] = [String(error), false];
  }
  console.log(JSON.stringify({ did, seen: String(seen).slice(0, 200), right }));
}

for (const [label, model] of Object.entries(models)) {
  const common = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  const weather = (seen) => ({
    get_weather: ai.tool({
      description: "Tell the weather of a city.",
      inputSchema: z.object({ city: z.enum(["Oslo", "Paris"]) }),
      execute: async ({ city }) => (seen.push(city), "rain"),
    }),
  });

  await step(`generateText, ${label}`, "", async () => {
    const { text, usage } = await ai.generateText({ ...common, prompt: QUESTION });
    check(isScripted ? text === ANSWER : text, text);
    check(usage.inputTokens > 0 && usage.outputTokens > 0, usage);
    return text;
  });

  await step(`streamText, ${label}: the same text`, "", async () => {
    const whole = await ai.generateText({ ...common, prompt: QUESTION });
    const stream = ai.streamText({ ...common, prompt: QUESTION, onError: ({ error }) => { throw error; } });
    let text = "", pieces = 0;
    for await (const piece of stream.textStream) [text, pieces] = [text + piece, pieces + 1];
    check(text === whole.text, text);
    return `${pieces} pieces`;
  });

  await step(`generateText with a tool, ${label}: called, its result answered`, "scripted", async () => {
    const seen = [];
    const { text } = await ai.generateText({
      ...common,
      prompt: "[play:weather] Weather in Oslo?",
      tools: weather(seen),
      stopWhen: ai.stepCountIs(4),
    });
    check(seen.join() === "Oslo", seen);
    check(text === "It rains in Oslo.", text);
    return text;
  });

  await step(`streamText with two calls, ${label}`, "scripted", async () => {
    const seen = [];
    const stream = ai.streamText({
      ...common,
      prompt: "[play:two-cities] Weather in Oslo and Paris?",
      tools: weather(seen),
      stopWhen: ai.stepCountIs(4),
    });
    check((await stream.text) === "It rains in Oslo.", await stream.text);
    check(seen.join() === "Oslo,Paris", seen);
    return seen;
  });

  await step(`generateText, toolChoice required, ${label}`, "", async () => {
    const seen = [];
    await ai.generateText({
      ...common,
      prompt: "[play:weather] Weather in Oslo?",
      tools: weather(seen),
      toolChoice: "required",
    });
    check(seen.length === 1 && typeof seen[0] === "string", seen);
    return seen;
  });

  await step(`generateText with a thought, ${label}`, label.startsWith("openai,") ? "neither" : "scripted", async () => {
    // The provider openai knows none in chats, and in responses only summaries of them.
    const { text, reasoningText } = await ai.generateText({ ...common, prompt: "[play:thought] Think." });
    check(text === ANSWER && reasoningText?.trim() === "Water falls through it.", { text, reasoningText });
    return reasoningText;
  });

  await step(`generateObject, ${label}`, "", async () => {
    const prompt = "[play:person] Tell of one person: a name and an age.";
    const { object } = await ai.generateObject({ ...common, schema: Person, prompt });
    check(!isScripted || JSON.stringify(object) === '{"name":"Ada Lovelace","age":36}', object);
    return JSON.stringify(object);
  });

  await step(`streamObject, ${label}`, "", async () => {
    const prompt = "[play:person] Tell of one person: a name and an age.";
    const stream = ai.streamObject({ ...common, schema: Person, prompt });
    let states = 0;
    for await (const _ of stream.partialObjectStream) states += 1;
    const object = await stream.object;
    check(states > 0, states);
    check(Person.safeParse(object).success, object);
    return JSON.stringify(object);
  });
}

await step("embedMany, openai-compatible", "real", async () => {
  const { embeddings } = await ai.embedMany({ model: compatible.textEmbeddingModel(name), values: ["water", "turbine"] });
  check(embeddings.length === 2 && embeddings[0].length > 8, embeddings.length);
  return `2 of ${embeddings[0].length} numbers`;
});
