"""A client made from /openapi.json: chats, completes, asks for a message and a response, and is refused. Prints JSON.

    python made_client.py URL QUESTION

The package `made` is what openapi-python-client writes. All fields go and come by its classes.
"""

from __future__ import annotations

import json
import sys

from made import Client
from made.api.default import chat_completions, completions, list_models, messages, responses, tokenize
from made.models import ChatCompletionsBody, CompletionsBody, Error, MessagesBody, ResponsesBody, TokenizeBody

url, question = sys.argv[1:]
asked = {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
with Client(url.removesuffix("/v1"), raise_on_unexpected_status=True, timeout=60) as client:
    chat = chat_completions.sync(client=client, body=ChatCompletionsBody.from_dict(asked))
    message = messages.sync(client=client, body=MessagesBody.from_dict(asked))
    response = responses.sync(
        client=client, body=ResponsesBody.from_dict({"input": question, "max_output_tokens": 16, "temperature": 0})
    )
    completion = completions.sync(client=client, body=CompletionsBody.from_dict({"prompt": question, "max_tokens": 4}))
    tokens = tokenize.sync(client=client, body=TokenizeBody.from_dict({"prompt": question}))
    models = list_models.sync(client=client)
    refused = chat_completions.sync(client=client, body=ChatCompletionsBody.from_dict({**asked, "max_tokens": -1}))
    assert isinstance(refused, Error), refused
print(
    json.dumps(
        {
            "text": chat.choices[0].message.content,
            "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
            "message": message.content[0].to_dict()["text"],
            "response": response.output[0].to_dict()["content"][0]["text"],
            "completion": completion.usage.completion_tokens,
            "tokens": tokens.to_dict()["tokens"],
            "models": [one.id for one in models.data],
            "refused": refused.error.message,
        }
    )
)
