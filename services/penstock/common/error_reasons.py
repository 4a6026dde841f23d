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
    _row("NOT_ON_BACKEND", "INVALID_ARGUMENT", "the request's backends are of another engine (vLLM, SGLang), which lacks this option or mode", "the message names field and backend: leave the option out, or add a backend of Penstock's own"),
    _row("UNKNOWN_FIELD", "INVALID_ARGUMENT", "the request has an option of a newer release, which would have no effect here", "update the service, or leave the option out"),
    _row("MALFORMED_MESSAGE", "INVALID_ARGUMENT", "the bytes are not a message of the call's type", "compare the client's protos with the server's"),
    _row("DUPLICATE_REQUEST_ID", "INVALID_ARGUMENT", "a request in progress has this id", "leave `request_id` out, or make it unique"),
    _row("EMPTY_PROMPT", "INVALID_ARGUMENT", "a prompt has no token, and the model has no id to begin it with", "send a token, or `config.bos_token_id`"),
    _row("PROMPT_TOO_LONG", "INVALID_ARGUMENT", "prompt and output do not fit the model's context", "shorten the prompt"),
    _row("TOKEN_OUT_OF_VOCABULARY", "INVALID_ARGUMENT", "a prompt or an option holds an id that the model does not have", "encode with this model's tokenizer"),
    _row("NO_TOKEN_LEFT", "INVALID_ARGUMENT", "the options left no token to draw", "one option allows only tokens that others forbid: drop one of them"),
    _row("PLUGIN_NOT_FOUND", "INVALID_ARGUMENT", "no logits processor or stopping criterion of this name is loaded", "load it with `--logits-processor` or `--stopping-criteria`"),
    _row("CONSTRAINT_DEAD_END", "INVALID_ARGUMENT", "a constraint left no token to continue with", "let the constraint end, or spell it with this vocabulary"),
    _row("CONSTRAINT_TOO_COMPLEX", "INVALID_ARGUMENT", "a constraint takes more time or memory than allowed, to compile or to follow", "simplify it, or raise `--constraint-compile-seconds` or `--constraint-compile-memory-bytes`"),
    _row("CONSTRAINT_TOO_LARGE", "INVALID_ARGUMENT", "a constraint has too many bytes or values", "shorten it, or raise `--max-constraint-bytes` or `--max-constraint-choices`"),
    _row("CONTROL_TOKENS_IN_CONTENT", "INVALID_ARGUMENT", "control tokens in a message change what the chat template does", "remove them from the content"),
    _row("TEMPLATE_REFUSED", "INVALID_ARGUMENT", "the chat template refused the conversation", "the message quotes the template's own words, if it gave any"),
    _row("TOO_LARGE", "INVALID_ARGUMENT", "the texts together are too long", _LESS),
    _row("TOO_MANY", "INVALID_ARGUMENT", "a list has too many entries", _LESS),
    _row("TOO_DEEP", "INVALID_ARGUMENT", "lists and objects are nested too deep", "flatten them; the message names the limit"),
    _row("MODEL_NOT_FOUND", "NOT_FOUND", "no model of this name is served", "leave `model` out, or use a name that ListModels returns"),
    _row("ADAPTER_NOT_FOUND", "NOT_FOUND", "no adapter of this name is known", "use a name that ListModels returns, load the adapter (`penstock adapters load`), or leave `adapter` out"),
    _row("ADAPTER_LOADING", "UNAVAILABLE", "no backend loaded the request's adapter in time", "try again later, load it beforehand (`penstock adapters load`), or raise `--adapter-load-seconds`"),
    _row("ADAPTER_LOADS_FULL", "RESOURCE_EXHAUSTED", "the limit on adapters being loaded for requests is reached", "try again later, or raise the router's `--max-adapter-loads`"),
    _row("ADAPTER_DIFFERS", "NOT_FOUND", "the adapter's name stands for other weights here than on the backend where the stream began", "routers try another backend; reload the adapter where it is old"),
    _row("NO_ADAPTER_ROOT", "FAILED_PRECONDITION", "the service has no folder to load adapters from", "start it with `--adapter-root`"),
    _row("ADAPTER_EXISTS", "INVALID_ARGUMENT", "an adapter of this name is loaded", "use another name, unload it first, or ask to replace it"),
    _row("ADAPTER_PATH", "INVALID_ARGUMENT", "the path has no adapter, or is outside the folder for adapters", "name a PEFT folder (adapter_config.json, adapter_model.safetensors) that the service can read, or a place in a store of `--adapter-store`"),
    _row("ADAPTER_RANK", "INVALID_ARGUMENT", "the rank of an adapter is not allowed", "raise `--max-adapter-rank`, or train the adapter with a lower rank"),
    _row("ADAPTER_UNSUPPORTED", "INVALID_ARGUMENT", "this kind of adapter is not served, or it changes a module that adapters cannot change", "the message names the kind or module; merge such an adapter into the model"),
    _row("ADAPTER_BROKEN", "INVALID_ARGUMENT", "the files of an adapter do not fit each other or the model, or a process of the model could not take them", "the message names file and tensor: save the adapter again, for this model; or it names the process: see its log"),
    _row("ADAPTER_STORE_DENIED", "FAILED_PRECONDITION", "a store refuses the credentials of the service's environment", "set HF_TOKEN, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for the service"),
    _row("ADAPTER_STORE_DOWN", "UNAVAILABLE", "a store of adapters does not answer, or not in time", "try again later, or raise `--adapter-fetch-seconds`"),
    _row("ADAPTER_DISK_FULL", "RESOURCE_EXHAUSTED", "adapters of stores have no room on disk", "try again later, unload one, or raise `--adapter-disk`"),
    _row("ADAPTER_SLOTS_FULL", "RESOURCE_EXHAUSTED", "requests use all the adapters that may be in memory, or the limit on known names is reached", "try again later, unload one, or raise `--max-adapters` or `--max-known-adapters`"),
    _row("ADAPTER_MEMORY_FULL", "RESOURCE_EXHAUSTED", "adapters in use leave no memory for another one, or a process of the model has no memory for it", "try again later, unload one, or raise `--adapter-memory`"),
    _row("ASSISTANT_NOT_FOUND", "NOT_FOUND", "no draft model or draft head of this name is served", "start the service with `--assistant-model` or `--draft-head`, or leave the option out"),
    _row("REQUEST_NOT_FOUND", "NOT_FOUND", "no request of the process has this id", "name a request that waits or runs; an ended one holds nothing"),
    _row("BACKEND_NOT_FOUND", "NOT_FOUND", "the router has no backend of this address or name", "send `penstock-backend` (`penstock debug state --backend`) with one that the message lists"),
    _row("GRAPH_NOT_FOUND", "NOT_FOUND", "the model has no graph of this name", "use a name from GetModelInfo's `forward_graphs`"),
    _row("LEASE_NOT_FOUND", "NOT_FOUND", "the lease never existed, or ended: it was freed, or nobody used it in time", "make a new one with AllocateTensors, and use it or open a Forward stream before it expires"),
    _row("TENSOR_NOT_FOUND", "NOT_FOUND", "the lease has no tensor with this handle", "use a handle that AllocateTensors or Forward returned for this lease or stream"),
    _row("SEQUENCE_NOT_FOUND", "NOT_FOUND", "a named sequence was freed while a call for it waited", "free it after its last call"),
    _row("MODEL_ACCESS_OFF", "FAILED_PRECONDITION", "this service or router does not open the model to callers", "start the service with `--model-access`, and a public router with `--model-token-file`"),
    _row("NO_GRAPH_TENSORS", "FAILED_PRECONDITION", "this server keeps no tensors", "raise `--max-graph-tensors` and `--max-graph-tensor-bytes`, or send tensors in messages"),
    _row("NO_GRAPHS", "FAILED_PRECONDITION", "transformers' modules run the model, or its layers keep compressed keys and values or states, so it has no graphs", "serve a native model type (docs/guide/models.md)"),
    _row("NO_ADMIN_TOKENS", "FAILED_PRECONDITION", "a router on a public address forwards no admin calls without tokens of their own", "start it with `--admin-token-file`"),
    _row("NO_CHAT_TEMPLATE", "FAILED_PRECONDITION", "the model has no chat template", "use Generate with a text, or start the tokenizer with a template"),
    _row("NO_TOKENIZER", "FAILED_PRECONDITION", "the model's folder has no tokenizer.json with a text for each token", "serve the folder with its tokenizer.json"),
    _row("TOKENIZER_MISMATCH", "FAILED_PRECONDITION", "tokenizer and model do not belong together", "serve both from the same folder"),
    _row("BLOCK_IN_USE", "FAILED_PRECONDITION", "requests hold KV blocks that a call would copy", "use blocks that no request holds: the message lists the held ones"),
    _row("NO_PREFIX_CACHE", "FAILED_PRECONDITION", "a prefix cannot be held: the prefix cache is off", "start with `--prefix-cache`"),
    _row("NO_HOST_POOL", "FAILED_PRECONDITION", "the process has no host pool", "start it with `--host-kv-memory`"),
    _row("BUSY", "FAILED_PRECONDITION", "the operation needs an idle engine", "drain the process first"),
    _row("RELOAD_FAILED", "FAILED_PRECONDITION", "the weights could not be read again; the old ones are still served", "fix what the message names, or start a new process"),
    _row("MODEL_ROOT_OFF", "FAILED_PRECONDITION", "the process does not load models from paths", "start it with `--model-root`, or send the files' bytes"),
    _row("MODEL_FOLDER", "FAILED_PRECONDITION", "the folder for files of models cannot be written", "set another one with `--model-upload-folder`"),
    _row("WRITE_WEIGHTS_OFF", "FAILED_PRECONDITION", "the service takes no new weights from callers", "start it with `--write-weights`"),
    _row("WEIGHTS_FIXED", "FAILED_PRECONDITION", "the model runs in a form that takes no new weights", "the message says why, and what takes some"),
    _row("WEIGHTS_TOO_LARGE", "RESOURCE_EXHAUSTED", "the tensors of a WriteWeights, and the parts made of them, do not fit memory or `--max-write-weights-memory`", "send fewer tensors at once, or raise the bound"),
    _row("MODEL_LOADED", "FAILED_PRECONDITION", "the process already has a model", "unload it first (UnloadModel, `penstock models unload`)"),
    _row("LOAD_IN_PROGRESS", "FAILED_PRECONDITION", "another model is being loaded or unloaded", "wait until that ends, or cancel that call"),
    _row("MODEL_REFUSED", "INVALID_ARGUMENT FAILED_PRECONDITION", "this release cannot load the files: cut short, too long, or a header or config.json that names something missing", "the message names the file, tensor or field"),
    _row("MODEL_TOO_LARGE", "RESOURCE_EXHAUSTED", "the model does not fit in memory, on the disk or within `--max-model-bytes`", "send a smaller one, choose `quantization`, free memory, or raise the flag that the message names"),
    _row("LOAD_FAILED", "INTERNAL", "loading broke on these files; the process goes on without a model", _SAY),
    _row("LOAD_CANCELLED", "CANCELLED", "the load's caller left", "load it again"),
    _row("UNAUTHENTICATED", "UNAUTHENTICATED", "the bearer token is missing or wrong", "send `authorization: Bearer …` with a token of the server's file"),
    _row("KEY_REVOKED", "UNAUTHENTICATED PERMISSION_DENIED", "the key was revoked; PERMISSION_DENIED: that of a batch", "ask the operator for another key"),
    _row("KEY_EXPIRED", "UNAUTHENTICATED PERMISSION_DENIED", "the key's time is over; PERMISSION_DENIED: that of a batch", "ask the operator for another key"),
    _row("KEY_GONE", "PERMISSION_DENIED", "the key of a batch is not in the file of keys any more", "make the batch again with a valid key"),
    _row("SCOPE_MISSING", "PERMISSION_DENIED", "the key may not make this call", "the message names the scope: the operator may add it in the file of keys"),
    _row("MODEL_NOT_ALLOWED", "PERMISSION_DENIED", "the key may not use this model or adapter", "use a name that ListModels returns for this key"),
    _row("QUOTA_EXCEEDED", "RESOURCE_EXHAUSTED", "a quota of the key has too little left", "wait for the time in RetryInfo, or ask for fewer new tokens; ErrorInfo has quota, limit and what remains"),
    _row("LEDGER_DOWN", "UNAVAILABLE", "the ledger of keys does not answer", "try again; operators: the disk or server of `--ledger`"),
    _row("KEY_NOT_FOUND", "NOT_FOUND", "no key of the file has this label", "use a label that `penstock keys list` shows"),
    _row("KEYS_OFF", "FAILED_PRECONDITION", "the router has no file of keys", "start it with `--keys-file`"),
    _row("NO_TOKEN", "UNAUTHENTICATED", "a token file is empty", "write a token into the file that the flag names"),
    _row("MODELS_FILE", "FAILED_PRECONDITION", "the router has no file of models, or the file is wrong", "the message names the key; start the router with `--models FILE`"),
    _row("ONE_BACKEND", "FAILED_PRECONDITION", "a roll needs another backend that serves meanwhile, or a second slot and memory for the model twice", "add a backend or a slot; or reload the only one (`penstock admin reload`)"),
    _row("MODEL_SLOTS_FULL", "RESOURCE_EXHAUSTED", "models in use have every slot for models on demand", "wait for the time in RetryInfo; add slots"),
    _row("QUEUE_FULL", "RESOURCE_EXHAUSTED", "the queue is full", "wait for the time in RetryInfo; add backends, or raise the queue's limit"),
    _row("OVERLOADED", "RESOURCE_EXHAUSTED", "with the requests that wait and run, the answer would not be complete before its deadline", "wait for the time in RetryInfo, allow more time, or add backends"),
    _row("TOO_MANY_RPCS", "RESOURCE_EXHAUSTED", "the limit on open calls is reached", "close some, or raise `--max-concurrent-rpcs`"),
    _row("TOO_MANY_SEQUENCES", "RESOURCE_EXHAUSTED", "the limit on sequences that the tokenizer decodes is reached", "raise the tokenizer's `--max-sequences`"),
    _row("GRAPH_QUOTA", "RESOURCE_EXHAUSTED", "the limit on tensors, leases, Forward streams or named sequences is reached", "free some, or raise the flag that the message names"),
    _row("MESSAGE_TOO_LARGE", "RESOURCE_EXHAUSTED", "a message is larger than the other side accepts", "send less at once, or raise `--max-message-bytes`"),
    _row("EXCEEDS_KV_POOL", "RESOURCE_EXHAUSTED", "the request would not fit an empty KV pool", "ask for fewer tokens or sequences, or raise `--kv-memory`"),
    _row("RESPONSE_TOO_LARGE", "RESOURCE_EXHAUSTED", "the answer does not fit one message", "ask for less at once"),
    _row("SLOW_READER", "RESOURCE_EXHAUSTED", "the client does not take its stream's messages", "read faster, or raise `--max-buffered-bytes` (answers of batches: `--stalled-reader-seconds`)"),
    _row("TEMPLATE_TIME_LIMIT", "RESOURCE_EXHAUSTED", "a chat template took too long", "shorten the conversation, or raise `--template-timeout-seconds`"),
    _row("TEMPLATE_MEMORY_LIMIT", "RESOURCE_EXHAUSTED", "a chat template took too much memory", "shorten the conversation, or raise `--template-memory-bytes`"),
    _row("STARTING", "UNAVAILABLE", "the service is loading", _AGAIN),
    _row("NO_MODEL", "UNAVAILABLE", "the process has no model (`--empty`, or after UnloadModel)", "load one (LoadModel, `penstock models load`), or send the request elsewhere"),
    _row("DRAINING", "UNAVAILABLE", "the service is shutting down", "send the request elsewhere, or again when the service is back"),
    _row("DRAIN_GRACE_OVER", "UNAVAILABLE ABORTED", "the service shut down or was drained before the stream ended", "resume from the tokens received; UNAVAILABLE: try again"),
    _row("NO_BACKEND", "UNAVAILABLE", "no generation service is ready", "start one, or wait"),
    _row("BACKEND_LOST", "UNAVAILABLE ABORTED", "a generation service died, and no other one took the stream over", "UNAVAILABLE: try again; ABORTED: resume after `last_seq`"),
    _row("TOKENIZER_UNAVAILABLE", "UNAVAILABLE", "the tokenizer cannot be reached", "start it, or wait"),
    _row("TOKENIZER_OVERLOADED", "UNAVAILABLE", "the tokenizer does not keep up", "add tokenizer processes (`--processes`)"),
    _row("ENGINE_STOPPED", "UNAVAILABLE ABORTED", "the generation service is stopping", _AGAIN),
    _row("ENGINE_HUNG", "UNAVAILABLE", "a step of the engine takes far longer than such steps take (`--hung-step-seconds`)", "send the request elsewhere; restart the service: its log has the engine's state"),
    _row("STEP_FAILED", "INTERNAL", "a step of the engine failed with this request in it; the process ends", "its log has the cause and the engine's state; a router moves the request once"),
    _row("ENGINE_FAILED", "INTERNAL UNAVAILABLE", "a step of the engine failed without this request in it, or a process of its model ended; the process ends", "its log has the cause and the engine's state; a router moves the request"),
    _row("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the caller's deadline passed", "allow more time"),
    _row("ABORTED", "CANCELLED", "an operator aborted the request", "ask the operator"),
    _row("CLIENT_GONE", "CANCELLED", "the client hung up", "nothing: no client reads this"),
    _row("POISON", "INTERNAL", "every backend that ran the request died, and no other request ran on all of them", "do not send it again; the backends' logs say why they died"),
    _row("MODEL_OUTPUT_NAN", "INTERNAL", "the model's output is NaN", "set `remove_invalid_values`, or look at the weights and `--dtype`"),
    _row("PLUGIN_FAILED", "INTERNAL", "a logits processor or stopping criterion of the server's owner failed", "tell the server's owner: the log has the exception"),
    _row("DECODING_FAILED", "INTERNAL", "a decoding mode failed on this request", _SAY),
    _row("CONSTRAINT_FAILED", "INTERNAL", "the output left its constraint", _SAY),
    _row("COMPILER_FAILED", "INTERNAL", "the process that compiles constraints did not start", _SAY),
    _row("TEMPLATE_PROCESS_DIED", "INTERNAL", "the process that renders the chat template died", _SAY),
    _row("DETOKENIZE_FAILED", "INTERNAL", "the answer could not be turned into text", _SAY),
    _row("BACKEND_PROTOCOL", "INTERNAL", "a generation service broke the protocol", "compare the versions of router and backend; the router's log has the details"),
    _row("CHAT_FORMAT", "INTERNAL", "reading the tool calls or the reasoning of an answer failed", "report it with the log line of this request; `--tool-format hermes` or `--reasoning-format none` may help meanwhile"),
    _row("TOKENIZER_PROTOCOL", "INTERNAL", "the tokenizer broke the protocol", "compare the versions of router and tokenizer"),
    _row("PATH_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such path", "use a path on the gateway's page"),
    _row("ORIGIN_NOT_ALLOWED", "HTTP-403", "a page of another origin calls the HTTP gateway from a browser", "allow it with `--allowed-origin`"),
    _row("METHOD_NOT_ALLOWED", "HTTP-405", "this path of the HTTP gateway takes another method", "use GET, POST or DELETE, as on the gateway's page"),
    _row("BODY_TIMEOUT", "HTTP-408", "the body of a request did not arrive in time", "send it faster, or raise `--body-seconds`"),
    _row("BODY_TOO_LARGE", "HTTP-413", "the body of a request is too large", "shorten it, or raise `--max-body-bytes`"),
    _row("HOST_NOT_ALLOWED", "HTTP-421", "a caller without a token calls the HTTP gateway by a name that is not its own", "call it by an address, or allow the name with `--allowed-hosts`"),
    _row("HEADERS_TOO_LARGE", "HTTP-431", "the headers of a request are too many or too large", "shorten them, or raise `--max-header-bytes` or `--max-headers`"),
    _row("TARGET_TOO_LONG", "HTTP-414", "the path and query of a request are too long", "shorten them, or raise `--max-target-bytes`"),
    _row("MALFORMED_REQUEST", "HTTP-400", "the request is not valid HTTP/1.1: its syntax, Host or Transfer-Encoding", "send HTTP as in RFC 9112"),
    _row("MAX_REQUESTS", "HTTP-429 RESOURCE_EXHAUSTED", "the limit on requests of the HTTP gateway is reached", "try again later, raise `--max-requests`, or start another gateway"),
    _row("RESPONSE_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such response of this caller", "it was never kept, was deleted, or is older than `--response-seconds`"),
    _row("PREVIOUS_RESPONSE_NOT_FOUND", "INVALID_ARGUMENT", "the response to build on, or one before it, is not kept", "send its items as `input`"),
    _row("RESPONSE_STORE_DOWN", "UNAVAILABLE", "the HTTP gateway's store of responses does not answer", "try again, or send all items as `input`; operators: the server of `--response-store`"),
    _row("RESPONSE_STORE_OFF", "FAILED_PRECONDITION", "the HTTP gateway keeps no responses", "start it with `--response-store`, or send all items"),
    _row("PREVIOUS_RESPONSE_NOT_READY", "INVALID_ARGUMENT", "the response to build on is still being made in the background", "poll it until its status is another than queued or in_progress"),
    _row("NOT_IN_BACKGROUND", "FAILED_PRECONDITION", "only a response made with `background` can be cancelled", "end the connection of its request instead"),
    _row("EVENTS_NOT_KEPT", "FAILED_PRECONDITION", "the events of this response cannot be streamed again here", "read it without `stream`; make it with `stream` and `background`, and ask the same gateway within `--background-event-seconds`"),
    _row("COMPACTION_NOT_SUPPORTED", "FAILED_PRECONDITION", "the HTTP gateway compacts no conversation", "send fewer items, or a summary that a response made"),
    _row("CONVERSATION_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such conversation of this caller", "it was never made, was deleted, or nobody changed it for `--conversation-seconds`"),
    _row("CONVERSATION_ITEM_NOT_FOUND", "NOT_FOUND", "the conversation has no such item", "use an id that a list of its items shows"),
    _row("CONVERSATIONS_FULL", "RESOURCE_EXHAUSTED", "the conversations of one token have their share of the bounds", "delete some; operators: `--conversations-share`, `--max-conversations`, `--max-conversation-bytes`"),
    _row("FILE_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such file of this caller", "it was never sent whole, was deleted, or is older than `--file-seconds`"),
    _row("FILE_TOO_LARGE", "RESOURCE_EXHAUSTED", "an uploaded file is too large", "send several files, or raise `--max-file-bytes`"),
    _row("FILE_IN_USE", "FAILED_PRECONDITION", "a batch in progress reads the file", "wait for its end, or cancel it"),
    _row("FILES_FULL", "RESOURCE_EXHAUSTED", "files have no room: of the caller, or of all", "delete files; operators: `--max-files`, `--max-files-bytes` and `--files-share`"),
    _row("BATCH_NOT_FOUND", "NOT_FOUND", "the HTTP gateway has no such batch of this caller", "it was never made, or ended longer ago than `--file-seconds`"),
    _row("BATCH_ENDED", "FAILED_PRECONDITION", "the batch to cancel has ended", "read its files"),
    _row("BATCH_NOT_ENDED", "FAILED_PRECONDITION", "the batch to read has not ended", "wait for its end (`wait_batch` of the Python clients), or cancel it"),
    _row("BATCHES_FULL", "RESOURCE_EXHAUSTED", "the limit on batches in progress is reached", "wait for the end of some; operators: `--max-batches` and `--files-share`"),
    _row("NO_JOB_TOKEN", "FAILED_PRECONDITION", "the router asks for tokens, and the HTTP gateway has none for the lines of batches, one that may not act for callers, or a key without the scope of the lines' calls", "start the gateway with `--job-token-file`: a token of the router's `--auth-token-file`, or a key with the scopes `delegate` and `generate` (or `embed`)"),
    _row("NO_UPLOADS", "FAILED_PRECONDITION", "the HTTP gateway lacks the package that reads forms", "install `penstock[gateway]`, which has python-multipart"),
    _row("JOB_STORE_OFF", "FAILED_PRECONDITION", "the HTTP gateway has no files and batches", "start it with `--job-store`"),
    _row("JOB_STORE_DOWN", "UNAVAILABLE", "the HTTP gateway's store of files and batches does not answer", "try again; operators: the disk or server of `--job-store`"),
    _row("INTERNAL", "INTERNAL", "any other fault of Penstock", _SAY),
)  # fmt: skip


def errors_markdown() -> str:
    """Make the text of docs/reference/errors.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Errors\n"
    yield (
        "Every error has a gRPC status and `google.rpc` details: `ErrorInfo` with a reason and the domain `penstock`, `BadRequest`\n"
        "with the field's path when a field is wrong, `RetryInfo` when waiting helps. Reasons are stable; messages are for people.\n"
        "Generated from `services/penstock/common/error_reasons.py` by `make docs`.\n"
    )
    yield "| reason | status | cause | what to do |"
    yield "|---|---|---|---|"
    for row in sorted(ERROR_REASONS, key=lambda row: row.name):
        yield f"| `{row.name}` | {', '.join(row.codes)} | {row.cause} | {row.remedy} |"
