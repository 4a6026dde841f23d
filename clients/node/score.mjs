// Ranks several continuations of a prompt: one line each, the likeliest first.
//
//   node score.mjs [--address localhost:50050] "The capital of France is" " Paris" " Rome"
//
// Exits 1 with the server's status and field when the call fails.
import { parseArgs } from "node:util";
import { connect, reportFailure } from "./chat.mjs";

// Resolves to [{logprob, is_greedy, logprobs}] in the order of the continuations.
export function score(client, prompt, continuations, { deadlineSeconds = 60 } = {}) {
  const items = continuations.map((continuation) => ({ prompt, continuation }));
  return new Promise((resolve, reject) => {
    const deadline = Date.now() + deadlineSeconds * 1000;
    client.Score({ items }, { deadline }, (error, answer) => (error ? reject(error) : resolve(answer.results)));
  });
}

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { address: { type: "string", default: "localhost:50050" } },
});
const [prompt, ...continuations] = positionals;
const client = connect(values.address);
try {
  const results = await score(client, prompt ?? "", continuations);
  const rows = results.map(({ logprob, is_greedy }, index) => ({ logprob, is_greedy, continuation: continuations[index] }));
  for (const row of rows.sort((one, other) => other.logprob - one.logprob)) console.log(JSON.stringify(row));
} catch (error) {
  reportFailure(error);
} finally {
  client.close();
}
