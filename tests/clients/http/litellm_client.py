"""litellm, unmodified: whole, streamed, a tool call, an error. Prints one JSON object."""

from __future__ import annotations

import json
import sys

import litellm

url, question, tool = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
common = {
    "model": "openai/penstock-demo",
    "api_base": url,
    "api_key": "none",
    "messages": [{"role": "user", "content": question}],
    "max_tokens": 16,
    "temperature": 0,
    "num_retries": 0,
}
whole = litellm.completion(**common)
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**common, stream=True)]
called = litellm.completion(**{**common, "max_tokens": 200}, tools=[tool], tool_choice="required")
try:
    litellm.completion(**{**common, "max_tokens": -1})
    refused = ""
except litellm.BadRequestError as error:
    refused = str(error)
call = called.choices[0].message.tool_calls[0].function
print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
            "pieces": pieces,
            "call": [call.name, json.loads(call.arguments)],
            "refused": refused,
        }
    )
)
