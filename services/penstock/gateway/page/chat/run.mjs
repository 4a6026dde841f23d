// One request on its way: its chunks become an answer, and further answers (num_return_sequences) its siblings.

import { emptyAnswer, takeChoice, takeFacts } from "./answer.mjs";
import { addTurn } from "./conversation.mjs";
import { Problem } from "./problem.mjs";

/** Streams an answer below the turn `parent`; `onturn(turn, isNew)` hears of every change. Resolves at the end. */
export async function run({ api, conversation, parent, body, fields, signal, onturn }) {
  const start = performance.now();
  const elapsed = () => (performance.now() - start) / 1000;
  const json = Boolean(body.response_format);
  const make = () => addTurn(conversation, parent, { ...emptyAnswer(), model: body.model ?? "", ...fields, json, running: true });
  const answers = [make()];
  const record = {};
  onturn(answers[0], true);
  try {
    for await (const chunk of api.chat(body, signal)) {
      if (chunk.model) answers[0].model ||= chunk.model;
      for (const choice of chunk.choices ?? []) {
        const index = choice.index ?? 0;
        const isNew = !answers[index];
        answers[index] ??= make();
        takeTimed(answers[index], choice, elapsed());
        onturn(answers[index], isNew);
      }
      takeFacts(record, chunk);
    }
  } catch (error) {
    if (signal.aborted) answers.forEach((answer) => { answer.stopped = true; });
    else answers[0].problem = (error instanceof Problem ? error : new Problem(String(error?.message ?? error))).toJSON();
  }
  for (const answer of answers) Object.assign(answer, record, { running: false, elapsed: elapsed() });
  // Of several answers the first is shown: the others are its branches.
  if (answers.length > 1) conversation.leaf = answers[0].id;
  answers.forEach((answer) => onturn(answer, false));
  return answers[0];
}

function takeTimed(answer, choice, now) {
  takeChoice(answer, choice);
  const isBegun = answer.content || answer.reasoning || answer.calls.length || answer.tokens.length;
  if (isBegun) answer.firstToken ??= now;
  if (answer.reasoning && (answer.content || answer.calls.length)) answer.reasoned ??= now - answer.firstToken;
}
