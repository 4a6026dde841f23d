"""Table of all reasons that an error of Penstock can have (`google.rpc.ErrorInfo.reason`), with cause and remedy.

docs/reference/errors.md is made from this table by `make docs`; a test compares it with the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorReason:
    """Row of the table: the gRPC codes of the reason, the cause, and the remedy for a caller or an operator."""

    name: str
    codes: tuple[str, ...]
    cause: str
    remedy: str


def _row(name: str, codes: str, cause: str, remedy: str) -> ErrorReason:
    return ErrorReason(name, tuple(codes.split()), cause, remedy)


_SAY = "report it, with the request id: the log of the service has the cause"
_AGAIN = "try again; the client library does so by itself"
_LESS = "send less at once"

ERROR_REASONS: tuple[ErrorReason, ...] = (
    _row("INVALID_FIELD", "INVALID_ARGUMENT", "a field has a value that it cannot have", "the message names the field and what is allowed"),
    _row("UNKNOWN_FIELD", "INVALID_ARGUMENT", "an option of a newer release, which would have no effect", "update the service, or leave the option out"),
    _row("MALFORMED_MESSAGE", "INVALID_ARGUMENT", "the bytes are no message of the call's type", "compare the client's protos with the server's"),
    _row("DUPLICATE_REQUEST_ID", "INVALID_ARGUMENT", "a live request has this id", "leave `request_id` out, or make it unique"),
    _row("EMPTY_PROMPT", "INVALID_ARGUMENT", "a prompt has no token, and there is no id to begin it with", "send one, or `config.bos_token_id`"),
    _row("PROMPT_TOO_LONG", "INVALID_ARGUMENT", "prompt and output do not fit the model's context", "shorten the prompt"),
    _row("TOKEN_OUT_OF_VOCABULARY", "INVALID_ARGUMENT", "a prompt or an option holds an id that the model does not have", "encode with this model's tokenizer"),
    _row("NO_TOKEN_LEFT", "INVALID_ARGUMENT", "options left no token to draw", "one option allows only what others forbid: drop one of them"),
    _row("PLUGIN_NOT_FOUND", "INVALID_ARGUMENT", "no logits processor or stopping criterion of this name is loaded", "load it by `--logits-processor` or `--stopping-criteria`"),
    _row("CONSTRAINT_DEAD_END", "INVALID_ARGUMENT", "a constraint left no token to go on with", "let the constraint end, or spell it with this vocabulary"),
    _row("CONSTRAINT_TOO_COMPLEX", "INVALID_ARGUMENT", "a constraint takes more time or memory than allowed, as it is compiled or as the output grows", "simplify it, or raise `--constraint-compile-seconds` or `--constraint-compile-memory-bytes`"),
    _row("CONSTRAINT_TOO_LARGE", "INVALID_ARGUMENT", "a constraint has too many bytes or values", "shorten it, or raise `--max-constraint-bytes` or `--max-constraint-choices`"),
    _row("CONTROL_TOKENS_IN_CONTENT", "INVALID_ARGUMENT", "control tokens in a message change what the chat template does", "remove them from the content"),
    _row("TEMPLATE_REFUSED", "INVALID_ARGUMENT", "the chat template refused the conversation", "the message has the template's own words, if it gave some"),
    _row("TOO_LARGE", "INVALID_ARGUMENT", "texts are too long together", _LESS),
    _row("TOO_MANY", "INVALID_ARGUMENT", "a list has too many entries", _LESS),
    _row("TOO_DEEP", "INVALID_ARGUMENT", "lists and objects are nested too deep within each other", "flatten them; the message has the bound"),
    _row("MODEL_NOT_FOUND", "NOT_FOUND", "no model of this name is served", "leave `model` out, or take a name that ListModels gives"),
    _row("ADAPTER_NOT_FOUND", "NOT_FOUND", "no adapter of this name is known", "take a name that ListModels gives, load it (`penstock adapters load`), or leave `adapter` out"),
    _row("ADAPTER_LOADING", "UNAVAILABLE", "no backend has loaded the request's adapter in time", "try again later, load it beforehand (`penstock adapters load`), or raise `--adapter-load-seconds`"),
    _row("ADAPTER_LOADS_FULL", "RESOURCE_EXHAUSTED", "as many adapters are being loaded for requests as may be", "try again later, or raise the router's `--max-adapter-loads`"),
    _row("ADAPTER_DIFFERS", "NOT_FOUND", "an adapter's name stands for other weights here than where the stream began", "routers try another backend; reload the adapter where it is old"),
    _row("NO_ADAPTER_ROOT", "FAILED_PRECONDITION", "the service was not told where adapters may be loaded from", "start it with `--adapter-root`"),
    _row("ADAPTER_EXISTS", "INVALID_ARGUMENT", "an adapter of this name is loaded", "take another name, unload it first, or ask for it to be replaced"),
    _row("ADAPTER_PATH", "INVALID_ARGUMENT", "there is no adapter at this path, or not where adapters may be", "name a PEFT folder (adapter_config.json, adapter_model.safetensors) that the service can read"),
    _row("ADAPTER_RANK", "INVALID_ARGUMENT", "an adapter has a rank that is not allowed", "raise `--max-adapter-rank`, or train it with a smaller one"),
    _row("ADAPTER_UNSUPPORTED", "INVALID_ARGUMENT", "an adapter is of a kind that is not served, or changes a module that adapters cannot change", "the message names it; merge such an adapter into the model"),
    _row("ADAPTER_BROKEN", "INVALID_ARGUMENT", "the files of an adapter do not fit each other, or the model, or a process of the model could not take them", "the message names file and tensor: save it again, for this model; or the process, whose log says why"),
    _row("ADAPTER_SLOTS_FULL", "RESOURCE_EXHAUSTED", "requests use as many adapters as may be in memory, or as many names are known as may be", "try again later, unload one, or raise `--max-adapters` or `--max-known-adapters`"),
    _row("ADAPTER_MEMORY_FULL", "RESOURCE_EXHAUSTED", "adapters in use leave no memory for another one, or a process of the model has none", "try again later, unload one, or raise `--adapter-memory`"),
    _row("ASSISTANT_NOT_FOUND", "NOT_FOUND", "no draft model of this name is served", "start the service with `--assistant-model`, or leave the option out"),
    _row("REQUEST_NOT_FOUND", "NOT_FOUND", "no live request of the process has this id", "name requests that wait or run; those that ended hold nothing"),
    _row("BACKEND_NOT_FOUND", "NOT_FOUND", "the router has no backend of this address or name", "send `penstock-backend` (`penstock debug state --backend`) with one that the message names"),
    _row("GRAPH_NOT_FOUND", "NOT_FOUND", "the model has no graph of this name", "take a name of GetModelInfo's `forward_graphs`"),
    _row("LEASE_NOT_FOUND", "NOT_FOUND", "a lease ended (nobody used it, or it was freed), or never was", "make a new one by AllocateTensors, and use it or hold a Forward stream within its time"),
    _row("TENSOR_NOT_FOUND", "NOT_FOUND", "the lease has no tensor of this handle", "take a handle that AllocateTensors or Forward gave for this very lease or stream"),
    _row("SEQUENCE_NOT_FOUND", "NOT_FOUND", "a named sequence was freed while a call of it waited", "free it after its last call"),
    _row("MODEL_ACCESS_OFF", "FAILED_PRECONDITION", "the model is not open to callers of this service or router", "start the service with `--model-access`, a public router with `--model-token-file`"),
    _row("NO_GRAPH_TENSORS", "FAILED_PRECONDITION", "no tensors stay at this server", "raise `--max-graph-tensors` and `--max-graph-tensor-bytes`, or send tensors in messages"),
    _row("NO_GRAPHS", "FAILED_PRECONDITION", "transformers' modules run the model: it has no graphs of its own", "serve a native model type (docs/guide/models.md)"),
    _row("NO_ADMIN_TOKENS", "FAILED_PRECONDITION", "a router on a public address forwards no admin calls without tokens of their own", "start it with `--admin-token-file`"),
    _row("NO_CHAT_TEMPLATE", "FAILED_PRECONDITION", "the model has no chat template", "use Generate with a text, or start the tokenizer with a template"),
    _row("NO_TOKENIZER", "FAILED_PRECONDITION", "the model's folder has no tokenizer.json that can be split by token", "serve the folder with its tokenizer.json"),
    _row("TOKENIZER_MISMATCH", "FAILED_PRECONDITION", "tokenizer and model do not belong together", "serve both from the same folder"),
    _row("BLOCK_IN_USE", "FAILED_PRECONDITION", "requests hold KV blocks that a call would copy", "take blocks that no request holds: the message lists those"),
    _row("NO_PREFIX_CACHE", "FAILED_PRECONDITION", "a prefix cannot be held: the prefix cache is off", "start with `--prefix-cache`"),
    _row("NO_HOST_POOL", "FAILED_PRECONDITION", "the process has no host pool", "start it with `--host-kv-memory`"),
    _row("BUSY", "FAILED_PRECONDITION", "the operation needs an idle engine", "drain the process first"),
    _row("RELOAD_FAILED", "FAILED_PRECONDITION", "the weights could not be read again; the old ones are served on", "mend what the message names, or start a new process"),
    _row("MODEL_ROOT_OFF", "FAILED_PRECONDITION", "the process loads from no path", "start it with `--model-root`, or send the files' bytes"),
    _row("MODEL_FOLDER", "FAILED_PRECONDITION", "the folder for files of models cannot be written", "give another one by `--model-upload-folder`"),
    _row("MODEL_LOADED", "FAILED_PRECONDITION", "the process has a model already", "unload it first (UnloadModel, `penstock models unload`)"),
    _row("LOAD_IN_PROGRESS", "FAILED_PRECONDITION", "a model is being loaded or unloaded: one at a time", "wait for its end, or cancel that call"),
    _row("MODEL_REFUSED", "INVALID_ARGUMENT FAILED_PRECONDITION", "the files are no model that this release loads: cut short, too many bytes, a header or config.json that says what is not there", "the message names the file, tensor or field"),
    _row("MODEL_TOO_LARGE", "RESOURCE_EXHAUSTED", "memory, disk or `--max-model-bytes` have no room for the model", "send a smaller one, choose `quantization`, free memory, or raise the flag that the message names"),
    _row("LOAD_FAILED", "INTERNAL", "loading broke on these files; the process goes on without a model", _SAY),
    _row("LOAD_CANCELLED", "CANCELLED", "the load's caller left", "load it again"),
    _row("UNAUTHENTICATED", "UNAUTHENTICATED", "the bearer token is missing or wrong", "send `authorization: Bearer …` with a token of the server's file"),
    _row("NO_TOKEN", "UNAUTHENTICATED", "a token file is empty", "write a token into the file that the flag names"),
    _row("QUEUE_FULL", "RESOURCE_EXHAUSTED", "as much waits as may wait", "wait as long as RetryInfo says; add backends or raise the queue's bound"),
    _row("OVERLOADED", "RESOURCE_EXHAUSTED", "so much waits or runs that the deadline would pass before the answer is complete", "wait as long as RetryInfo says, give more time, or add backends"),
    _row("TOO_MANY_RPCS", "RESOURCE_EXHAUSTED", "as many calls are open as may be", "close some, or raise `--max-concurrent-rpcs`"),
    _row("TOO_MANY_SEQUENCES", "RESOURCE_EXHAUSTED", "the tokenizer decodes as many sequences as it may", "raise the tokenizer's `--max-sequences`"),
    _row("GRAPH_QUOTA", "RESOURCE_EXHAUSTED", "tensors, leases, Forward streams or named sequences hold as much as they may", "free some, or raise the flag that the message names"),
    _row("MESSAGE_TOO_LARGE", "RESOURCE_EXHAUSTED", "a message is larger than the other side takes", "send less at once, or raise `--max-message-bytes`"),
    _row("EXCEEDS_KV_POOL", "RESOURCE_EXHAUSTED", "an empty KV pool could not hold the request", "ask for fewer tokens or sequences, or raise `--kv-memory`"),
    _row("RESPONSE_TOO_LARGE", "RESOURCE_EXHAUSTED", "the answer does not fit one message", "ask for less at once"),
    _row("SLOW_READER", "RESOURCE_EXHAUSTED", "the client does not take its stream's messages", "read faster, or raise `--max-buffered-bytes`"),
    _row("TEMPLATE_TIME_LIMIT", "RESOURCE_EXHAUSTED", "a chat template took too long", "shorten the conversation, or raise `--template-timeout-seconds`"),
    _row("TEMPLATE_MEMORY_LIMIT", "RESOURCE_EXHAUSTED", "a chat template took too much memory", "shorten the conversation, or raise `--template-memory-bytes`"),
    _row("STARTING", "UNAVAILABLE", "the service is loading", _AGAIN),
    _row("NO_MODEL", "UNAVAILABLE", "the process has no model (`--empty`, or after UnloadModel)", "load one (LoadModel, `penstock models load`), or send the request elsewhere"),
    _row("DRAINING", "UNAVAILABLE", "the service is going down", "send the request elsewhere, or again when it is back"),
    _row("DRAIN_GRACE_OVER", "UNAVAILABLE ABORTED", "the service went down, or was drained, before the stream's end", "resume from the tokens received; UNAVAILABLE: try again"),
    _row("NO_BACKEND", "UNAVAILABLE", "no generation service is ready", "start one, or wait"),
    _row("BACKEND_LOST", "UNAVAILABLE ABORTED", "a generation service died, and no other took the stream over", "UNAVAILABLE: try again; ABORTED: resume after `last_seq`"),
    _row("TOKENIZER_UNAVAILABLE", "UNAVAILABLE", "the tokenizer is not there", "start it, or wait"),
    _row("TOKENIZER_OVERLOADED", "UNAVAILABLE", "the tokenizer does not keep up", "add tokenizer processes (`--processes`)"),
    _row("ENGINE_STOPPED", "UNAVAILABLE ABORTED", "the generation service is stopping", _AGAIN),
    _row("ENGINE_HUNG", "UNAVAILABLE", "a step of the engine takes far longer than such steps do (`--hung-step-seconds`)", "send the request elsewhere; the service's log has the engine's state: restart it"),
    _row("STEP_FAILED", "INTERNAL", "a step of the engine broke with this request in it; the process ends", "its log has the cause and the engine's state; a router moves the request once"),
    _row("ENGINE_FAILED", "INTERNAL UNAVAILABLE", "a step of the engine broke without this request in it, or a process of its model ended; the process ends", "its log has the cause and the engine's state; a router moves the request"),
    _row("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the caller's deadline passed", "give more time"),
    _row("ABORTED", "CANCELLED", "an operator aborted the request", "ask the operator"),
    _row("CLIENT_GONE", "CANCELLED", "the client hung up", "nothing: no client reads this"),
    _row("POISON", "INTERNAL", "every backend that ran the request died, and nothing else ran on all of them", "do not send it again; the backends' logs say why they died"),
    _row("MODEL_OUTPUT_NAN", "INTERNAL", "the model's output is not a number", "set `remove_invalid_values`, or look at the weights and `--dtype`"),
    _row("PLUGIN_FAILED", "INTERNAL", "a logits processor or stopping criterion of the server's owner failed", "tell the server's owner: the log has the exception"),
    _row("DECODING_FAILED", "INTERNAL", "a decoding mode broke on this request", _SAY),
    _row("CONSTRAINT_FAILED", "INTERNAL", "the output left its constraint", _SAY),
    _row("COMPILER_FAILED", "INTERNAL", "the process that compiles constraints did not start", _SAY),
    _row("TEMPLATE_PROCESS_DIED", "INTERNAL", "the process that renders the chat template died", _SAY),
    _row("DETOKENIZE_FAILED", "INTERNAL", "the answer could not be turned into text", _SAY),
    _row("BACKEND_PROTOCOL", "INTERNAL", "a generation service broke the protocol", "compare the versions of router and backend; the router's log says what it broke"),
    _row("CHAT_FORMAT", "INTERNAL", "reading the tool calls or the reasoning of an answer failed", "report it with the log line of this request; `--tool-format hermes` or `--reasoning-format none` may help meanwhile"),
    _row("TOKENIZER_PROTOCOL", "INTERNAL", "the tokenizer broke the protocol", "compare the versions of router and tokenizer"),
    _row("PATH_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such path", "take one of the gateway's page"),
    _row("ORIGIN_NOT_ALLOWED", "HTTP-403", "a page of another origin calls the HTTP gateway from a browser", "let it in: `--allowed-origin`"),
    _row("METHOD_NOT_ALLOWED", "HTTP-405", "a path of the HTTP gateway takes another method", "GET, POST or DELETE, as the gateway's page says"),
    _row("BODY_TIMEOUT", "HTTP-408", "the body of a request did not come in time", "send it faster, or raise `--body-seconds`"),
    _row("BODY_TOO_LARGE", "HTTP-413", "the body of a request is too large", "shorten it, or raise `--max-body-bytes`"),
    _row("HOST_NOT_ALLOWED", "HTTP-421", "a caller without a token calls the HTTP gateway by a name that is not its own", "call it by an address, or let the name in: `--allowed-hosts`"),
    _row("HEADERS_TOO_LARGE", "HTTP-431", "the headers of a request are too many or too large", "shorten them, or raise `--max-header-bytes` or `--max-headers`"),
    _row("TARGET_TOO_LONG", "HTTP-414", "path and query of a request are too long", "shorten them, or raise `--max-target-bytes`"),
    _row("MALFORMED_REQUEST", "HTTP-400", "what came is no request of HTTP/1.1: its form, Host or Transfer-Encoding", "send HTTP as RFC 9112 has it"),
    _row("MAX_REQUESTS", "HTTP-429", "the HTTP gateway has as many requests as it may", "try again later, raise `--max-requests`, or start another gateway"),
    _row("RESPONSE_NOT_FOUND", "NOT_FOUND", "the HTTP gateway keeps no such response of this caller", "it was never kept, was deleted, or is older than `--response-seconds`"),
    _row("PREVIOUS_RESPONSE_NOT_FOUND", "INVALID_ARGUMENT", "the response to build on, or one before it, is not kept", "send its items as `input`"),
    _row("RESPONSE_STORE_DOWN", "UNAVAILABLE", "the HTTP gateway's store of responses does not answer", "try again, or send all items as `input`; operators: the server of `--response-store`"),
    _row("RESPONSE_STORE_OFF", "FAILED_PRECONDITION", "the HTTP gateway keeps no responses", "start it with `--response-store`, or send all items"),
    _row("INTERNAL", "INTERNAL", "anything else; our fault", _SAY),
)  # fmt: skip


def errors_markdown() -> str:
    """Make the text of docs/reference/errors.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Errors\n"
    yield (
        "Every error has a gRPC status and `google.rpc` details: `ErrorInfo` with a reason and the domain `penstock`, `BadRequest`\n"
        "with the field's path where a field is wrong, `RetryInfo` where waiting helps. Reasons are stable; messages are for people.\n"
        "Generated from `services/penstock/common/error_reasons.py` by `make docs`.\n"
    )
    yield "| reason | status | cause | what to do |"
    yield "|---|---|---|---|"
    for row in sorted(ERROR_REASONS, key=lambda row: row.name):
        yield f"| `{row.name}` | {', '.join(row.codes)} | {row.cause} | {row.remedy} |"
