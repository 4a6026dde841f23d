// The npm package made by `make sdks`: `node main.js ADDRESS VECTORS`. See the README beside this file.
import { readFileSync } from "node:fs";
import { credentials, ServiceError } from "@grpc/grpc-js";
import {
  BadRequest,
  ChatDelta,
  ChatRequest,
  ChatResponse,
  ErrorInfo,
  finishReasonToJSON,
  RetryInfo,
  SequenceResult,
  Status,
  TextServiceClient,
  ToolCallDelta,
} from "penstock-client";

type Seen = Record<string, string>;
interface Vector {
  name: string;
  kind: "stream" | "request" | "error";
  messages: string[];
  expect: Seen;
}

// Folds the events of a Chat into answers.
class Collector {
  private next = 0n;
  private seen: Seen = {};
  private ids: Record<number, number[]> = {};
  private tools: Record<number, ToolCallDelta[]> = {};
  private finished = false;
  private failed = "";

  feed(event: ChatResponse): void {
    if (this.finished) this.failed = "PROTOCOL";
    if (event.delta) this.take(event.delta);
    if (event.finished) {
      this.finished = true;
      event.finished.sequences.forEach((result) => this.finish(result));
    }
  }

  private add(key: string, index: number, text: string): void {
    this.seen[`${key}.${index}`] = (this.seen[`${key}.${index}`] ?? "") + text;
  }

  private take(delta: ChatDelta): void {
    if (delta.seq !== this.next) this.failed = "PROTOCOL";
    this.next += 1n;
    this.add("text", delta.index, delta.text);
    this.add("reasoning", delta.index, delta.reasoning);
    (this.ids[delta.index] ??= []).push(...delta.tokenIds);
    for (const piece of delta.toolCalls) {
      const calls = (this.tools[delta.index] ??= []);
      const call = (calls[piece.index] ??= ToolCallDelta.create());
      call.id += piece.id;
      call.name += piece.name;
      call.arguments += piece.arguments;
    }
  }

  private finish(result: SequenceResult): void {
    this.add("finish", result.index, finishReasonToJSON(result.finishReason).replace("FINISH_REASON_", ""));
    this.add("count", result.index, String(result.tokenCount));
    const stop = result.stopString ?? result.stopTokenId;
    if (stop !== undefined) this.add("stop", result.index, String(stop));
  }

  result(): Seen {
    if (!this.failed && !this.finished) this.failed = "TRUNCATED_STREAM";
    if (this.failed) return { error: this.failed };
    for (const [index, ids] of Object.entries(this.ids)) this.seen[`ids.${index}`] = ids.join(",");
    for (const [index, calls] of Object.entries(this.tools))
      this.seen[`tools.${index}`] = calls.map((call) => `${call.id}|${call.name}|${call.arguments}`).join("\n");
    return this.seen;
  }
}

function stream(messages: Buffer[]): Seen {
  const collector = new Collector();
  messages.forEach((message) => collector.feed(ChatResponse.decode(message)));
  return collector.result();
}

function request(messages: Buffer[]): Seen {
  const again = ChatRequest.decode(ChatRequest.encode(ChatRequest.decode(messages[0]!)).finish());
  const told = (value: unknown): string => (value === undefined ? "unset" : String(value));
  return {
    content: again.messages[0]?.content ?? "",
    temperature: told(again.config?.temperature),
    top_k: told(again.config?.topK),
    do_sample: told(again.config?.doSample),
    seed: told(again.config?.seed),
  };
}

function details(status: Status): Seen {
  const seen: Seen = { code: String(status.code), message: status.message };
  for (const { typeUrl, value } of status.details) {
    const type = typeUrl.slice(typeUrl.lastIndexOf("/") + 1);
    if (type === "google.rpc.ErrorInfo") seen.reason = ErrorInfo.decode(value).reason;
    if (type === "google.rpc.BadRequest") {
      const violation = BadRequest.decode(value).fieldViolations[0]!;
      seen.field = violation.field;
      seen.description = violation.description;
    }
    if (type === "google.rpc.RetryInfo") {
      const delay = RetryInfo.decode(value).retryDelay!;
      seen.retry_ms = String(delay.seconds * 1000n + BigInt(Math.trunc(delay.nanos / 1e6)));
    }
  }
  return seen;
}

const kinds = { stream, request, error: (messages: Buffer[]) => details(Status.decode(messages[0]!)) };

async function main(): Promise<void> {
  const [address, path] = process.argv.slice(2) as [string, string];
  const { vectors } = JSON.parse(readFileSync(path, "utf8")) as { vectors: Vector[] };
  for (const { name, kind, messages, expect } of vectors) {
    const seen = kinds[kind](messages.map((message) => Buffer.from(message, "hex")));
    const keys = [...new Set([...Object.keys(seen), ...Object.keys(expect)])].sort();
    const wrong = keys.find((key) => (seen[key] ?? "") !== (expect[key] ?? ""));
    console.log(`vector ${name} ${wrong === undefined ? "ok" : `wrong ${wrong} ${seen[wrong]}`}`);
  }
  const client = new TextServiceClient(address, credentials.createInsecure());
  const ask = (maxNewTokens: number) =>
    client.chat(
      ChatRequest.fromPartial({ messages: [{ role: "user", content: "What is Penstock?" }], config: { maxNewTokens } }),
      { deadline: Date.now() + 120_000 },
    );
  const collector = new Collector();
  for await (const event of ask(64)) collector.feed(event as ChatResponse);
  console.log("chat", Buffer.from(collector.result()["text.0"] ?? "").toString("hex"));
  try {
    for await (const _ of ask(0));
  } catch (error) {
    const [bytes] = (error as ServiceError).metadata.get("grpc-status-details-bin");
    console.log("error", details(Status.decode(bytes as Buffer)).field);
  }
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
