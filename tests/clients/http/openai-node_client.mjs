// openai-node, unmodified: whole, streamed, a tool call, an error. Prints one JSON object.
import OpenAI from "openai";

const [url, question, tool] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4])];
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const common = {
  model: "penstock-demo",
  messages: [{ role: "user", content: question }],
  max_tokens: 16,
  temperature: 0,
};
const whole = await client.chat.completions.create(common);
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...common, stream: true })) {
  pieces.push(chunk.choices[0].delta.content ?? "");
}
const called = await client.chat.completions.create({
  ...common,
  max_tokens: 200,
  tools: [tool],
  tool_choice: "required",
});
let refused = "";
try {
  await client.chat.completions.create({ ...common, max_tokens: -1 });
} catch (error) {
  if (!(error instanceof OpenAI.BadRequestError)) throw error;
  refused = error.message;
}
const call = called.choices[0].message.tool_calls[0].function;
console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    usage: [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    pieces,
    call: [call.name, JSON.parse(call.arguments)],
    refused,
  }),
);
