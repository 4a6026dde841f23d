// Server-sent events from a stream of bytes.

// A line longer than this is no event of a chat; it would fill the reader's memory.
const LONGEST_LINE = 8 * 1024 * 1024;

/** Yields the data of each event of a ReadableStream of bytes. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > LONGEST_LINE) throw new Error("the server sent a line without an end");
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
