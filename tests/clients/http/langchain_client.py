"""langchain-openai, unmodified: whole, streamed, a tool call, an error. Prints one JSON object."""

from __future__ import annotations

import json
import sys

import openai
from langchain_openai import ChatOpenAI

url, question, tool = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def chat(max_tokens: int) -> ChatOpenAI:
    return ChatOpenAI(
        model="penstock-demo", base_url=url, api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0
    )


whole = chat(16).invoke(question)
pieces = [str(chunk.content) for chunk in chat(16).stream(question)]
called = chat(200).bind_tools([tool], tool_choice="required").invoke(question)
try:
    chat(-1).invoke(question)
    refused = ""
except openai.BadRequestError as error:
    refused = str(error)
print(
    json.dumps(
        {
            "text": whole.content,
            "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
            "pieces": pieces,
            "call": [called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
            "refused": refused,
        }
    )
)
