// Code as pieces with kinds: comment, string, number, keyword, plain. One small tokenizer for all languages.

const WORDS = new Set((
  "abstract and as assert async await bool boolean break case catch char class const constexpr continue def default del do double elif else end enum esac except " +
  "export extends extern False false fi final finally float fn for foreach from func function global go goto if impl implements import in include instanceof int " +
  "interface is lambda let long loop match mod module mut namespace new nil None nonlocal not null nullptr operator or package pass private protected pub public raise " +
  "range return self Self short signed sizeof static string struct super switch template then this throw throws trait True true try type typedef typeof undefined " +
  "union unless unsigned until use using val var virtual void when where while with xor yield SELECT FROM WHERE INSERT INTO VALUES UPDATE DELETE CREATE TABLE JOIN " +
  "LEFT RIGHT INNER ON GROUP ORDER BY HAVING LIMIT AND OR NOT NULL AS SET DROP ALTER DISTINCT UNION"
).split(" "));
// Languages whose comments begin with #, or --; all others have // and /* */.
const HASH = new Set("python py bash sh shell zsh fish ruby rb perl yaml yml toml ini conf dockerfile docker makefile make r elixir nix cmake powershell ps1".split(" "));
const DASH = new Set("sql lua haskell hs ada vhdl".split(" "));
const NONE = new Set(["", "text", "txt", "plain", "plaintext", "markdown", "md", "diff", "console", "output", "log"]);
// Longer code stays plain: it streams, and is read anew with each piece.
const LONGEST = 20000;

const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\.)*`";
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;

function pattern(comment) {
  return new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>[A-Za-z_]\\w*)`, "g");
}

const COMMENTS = { hash: "#[^\\n]*", dash: "--[^\\n]*", slash: "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)" };

/** Returns `[{ kind, text }]`, which together are the text. */
export function codePieces(text, language) {
  const name = language.toLowerCase();
  if (NONE.has(name) || text.length > LONGEST) return [{ kind: "plain", text }];
  const style = HASH.has(name) ? COMMENTS.hash : DASH.has(name) ? COMMENTS.dash : COMMENTS.slash;
  const pieces = [];
  const put = (kind, part) => {
    const last = pieces.at(-1);
    if (last?.kind === kind) last.text += part;
    else if (part) pieces.push({ kind, text: part });
  };
  let at = 0;
  for (const found of text.matchAll(pattern(style))) {
    const { comment, string, number, word } = found.groups;
    put("plain", text.slice(at, found.index));
    const kind = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word) ? "keyword" : "plain";
    put(kind, found[0]);
    at = found.index + found[0].length;
  }
  put("plain", text.slice(at));
  return pieces;
}
