// Streams one chat answer to stdout; usage and timings go to stderr.
//
//   npm install
//   node chat.mjs [--address localhost:50050] [--max-new-tokens 64] "What is Penstock?"
//   node chat.mjs --options '{"num_beams": 4, "choice": ["yes", "no"]}' "Is water wet?"
//
// Written from protos/penstock/v1 alone. Exits 1 with the server's status and field when the call fails.
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { toRequest } from "./options.mjs";

const protos = fileURLToPath(new URL("../../protos", import.meta.url));

export function connect(address) {
  const definition = protoLoader.loadSync("penstock/v1/text.proto", {
    includeDirs: [protos],
    // Names as in the protos; uint64 as strings, since JavaScript's numbers end at 2^53; `event` names the oneof set.
    keepCase: true,
    longs: String,
    enums: String,
    oneofs: true,
  });
  const { penstock } = grpc.loadPackageDefinition(definition);
  return new penstock.v1.TextService(address, grpc.credentials.createInsecure());
}

// Yields the events of one chat: {started}, {delta}, …, {finished}. Throws when the stream ends without `finished`.
export async function* chat(client, request, { deadlineSeconds = 60 } = {}) {
  const call = client.Chat(request, { deadline: Date.now() + deadlineSeconds * 1000 });
  let finished = false;
  try {
    for await (const message of call) {
      finished ||= message.event === "finished";
      yield message;
    }
  } finally {
    call.cancel();
  }
  if (!finished) throw new Error("the stream ended without Finished");
}

// A message without the names `_field` that the loader adds for every optional field: for people.
export function plain(message) {
  return Object.fromEntries(Object.entries(message).filter(([name]) => !name.startsWith("_")));
}

// Writes the server's status and its message about the field to stderr.
export function reportFailure(error) {
  const status = Object.keys(grpc.status).find((name) => grpc.status[name] === error.code);
  console.error(`${status ?? "ERROR"}: ${error.details ?? error.message}`);
  process.exit(1);
}

async function main() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      address: { type: "string", default: "localhost:50050" },
      "max-new-tokens": { type: "string", default: "64" },
      seed: { type: "string" },
      // JSON of any options of a request, by Hugging Face's names.
      options: { type: "string", default: "{}" },
    },
  });
  const client = connect(values.address);
  const request = {
    messages: [{ role: "user", content: positionals.join(" ") || "What is Penstock?" }],
    ...toRequest({
      max_new_tokens: Number(values["max-new-tokens"]),
      seed: values.seed,
      ...JSON.parse(values.options),
    }),
  };
  for await (const message of chat(client, request)) {
    if (message.event === "delta") process.stdout.write(message.delta.text);
    if (message.event === "finished") {
      const { sequences, usage, timings } = message.finished;
      process.stdout.write("\n");
      const summary = { finish_reason: sequences[0]?.finish_reason, usage: plain(usage), timings: plain(timings) };
      console.error(JSON.stringify(summary));
    }
  }
  client.close();
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  main().catch(reportFailure);
}
