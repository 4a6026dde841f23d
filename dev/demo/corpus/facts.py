"""Facts that the demo model knows about Penstock: answer, words that a right answer must have, ways to ask for it.

The last wording of each fact is held out: the model is never trained on it, whatever is put around it.
"""

from typing import NamedTuple


class Fact(NamedTuple):
    """One thing to know. `needles` must all occur in a right answer."""

    answer: str
    needles: tuple[str, ...]
    questions: tuple[str, ...]


FACTS: tuple[Fact, ...] = (
    Fact(
        "Penstock serves Hugging Face's generate() over gRPC. It batches requests continuously over one paged KV pool, "
        "behind three small services.",
        ("generate()", "paged kv pool"),
        ("What is Penstock?", "What's Penstock?", "Tell me about Penstock.", "What does Penstock do?",
         "Describe Penstock.", "What is Penstock for?", "Tell me what Penstock is."),
    ),
    Fact(
        "Penstock has three services: the router, the tokenizer and the generation service.",
        ("router", "tokenizer", "generation"),
        ("Which services does Penstock have?", "What are the three services?", "Name the services of Penstock.",
         "What services are there?", "List the three services of Penstock.", "How many services does Penstock have?",
         "What are the services of Penstock?"),
    ),
    Fact(
        "The router takes requests from clients, picks a backend, and streams text back. It also moves a request when "
        "a backend is lost.",
        ("router", "backend"),
        ("What does the router do?", "What is the router?", "Explain the router.", "What is the router for?",
         "Why is there a router?", "Tell me about the router.", "What is the job of the router?"),
    ),
    Fact(
        "The tokenizer service turns text into token ids and back, and renders chat templates. It needs no torch.",
        ("token ids", "chat templates"),
        ("What does the tokenizer do?", "What is the tokenizer service?", "Explain the tokenizer.",
         "What is the tokenizer for?", "Tell me about the tokenizer.", "What is the job of the tokenizer?"),
    ),
    Fact(
        "The generation service runs the model: token ids in, token ids out. It schedules all requests over one KV "
        "pool.",
        ("runs the model",),
        ("What does the generation service do?", "What is the generation service?", "Explain the generation service.",
         "What is the generation service for?", "Tell me about the generation service.",
         "What is the job of the generation service?"),
    ),
    Fact(
        "Penstock can decode with greedy search, sampling, beam search, group beam search, contrastive search, "
        "assisted decoding and constrained beam search.",
        ("greedy", "sampling", "beam search"),
        ("Which decoding modes are there?", "What decoding modes does Penstock have?", "List the decoding modes.",
         "Which decoding strategies can I use?", "How can Penstock decode?", "Name the decoding modes.",
         "What are the decoding modes?"),
    ),
    Fact(
        "Every service answers grpc.health.v1. Run penstock health, or call Check or Watch.",
        ("grpc.health.v1", "penstock health"),
        ("How do I check the health?", "Is there a health check?", "How do I see if a service is healthy?",
         "What about health checks?", "How can I check health?", "Which health service is there?",
         "How do I do a health check?"),
    ),
    Fact(
        "Every process serves /metrics for Prometheus, and there is a Grafana dashboard.",
        ("/metrics", "prometheus"),
        ("Where are the metrics?", "How do I get metrics?", "Are there metrics?", "Does Penstock have metrics?",
         "What metrics are there?", "How can I see the metrics?", "Where can I find the metrics?"),
    ),
    Fact(
        "Press Ctrl-C or send SIGTERM. Penstock stops taking requests, finishes the running ones and exits with code "
        "0.",
        ("ctrl-c", "sigterm"),
        ("How do I stop Penstock?", "How do I stop the server?", "How can I stop it?", "How do I shut it down?",
         "How do I shut down Penstock?", "What is the right way to stop Penstock?", "How can I stop Penstock?"),
    ),
    Fact(
        "Run penstock serve. With no model given, it serves the embedded demo model.",
        ("penstock serve",),
        ("How do I start Penstock?", "How do I start the server?", "How can I run Penstock?", "How do I run it?",
         "How do I launch Penstock?", "Which command starts Penstock?", "How can I start Penstock?"),
    ),
    Fact(
        "I am Penstock's demo model: a very small language model, trained on a CPU in less than an hour.",
        ("demo model", "small"),
        ("Who are you?", "What are you?", "What is your name?", "Which model are you?", "Tell me about yourself.",
         "What kind of model are you?", "Introduce yourself."),
    ),
    Fact(
        "I can talk about Penstock, add and subtract, convert units, name capitals, spell and reverse words, and call "
        "tools.",
        ("penstock", "capitals", "spell"),
        ("What can you do?", "What can I ask you?", "How can you help me?", "What are you able to do?",
         "What do you know?", "Give me an idea of what you can do.", "Which things can you do?"),
    ),
    Fact(
        "Penstock runs on CPU, on NVIDIA GPUs with CUDA, and on Ascend NPUs.",
        ("cpu", "cuda", "ascend"),
        ("Which devices does Penstock run on?", "What hardware does it need?", "Does Penstock need a GPU?",
         "Which hardware does Penstock support?", "Can Penstock run on a CPU?", "Which devices are supported?",
         "What devices does Penstock support?"),
    ),
    Fact(
        "A penstock is the gated pipe that carries a stream of water to the turbine.",
        ("pipe", "turbine"),
        ("What is a penstock?", "What does the word penstock mean?", "Why is it called Penstock?",
         "Where does the name Penstock come from?", "What does the name Penstock mean?",
         "What is the meaning of the name Penstock?"),
    ),
    Fact(
        "Continuous batching means that requests join and leave the running batch at every step, so no request waits "
        "for another to end.",
        ("every step",),
        ("What is continuous batching?", "Explain continuous batching.", "What does continuous batching mean?",
         "How does continuous batching work?", "What is batching?", "Tell me about continuous batching."),
    ),
    Fact(
        "The KV pool keeps the keys and values of all requests in blocks of equal size. Requests with the same prefix "
        "share blocks.",
        ("keys and values", "blocks"),
        ("What is the KV pool?", "Explain the KV pool.", "What does the KV pool do?", "How does the KV pool work?",
         "What is the paged KV pool?", "Tell me about the KV pool."),
    ),
    Fact(
        "Answers are streamed: each delta carries new text as soon as the model has made it.",
        ("streamed", "delta"),
        ("How does streaming work?", "Are answers streamed?", "What is streaming?", "Can Penstock stream?",
         "Does Penstock stream text?", "Explain streaming.", "How does Penstock stream text?"),
    ),
    Fact(
        "Cancel the call: the request is aborted within two steps and its blocks are free again.",
        ("aborted", "blocks"),
        ("How do I cancel a request?", "What happens when I cancel?", "Can I cancel a request?",
         "How do I abort a request?", "How can I cancel a call?", "How can I cancel a request?"),
    ),
    Fact(
        "Set seed in the request. The same seed on the same build and hardware gives the same text.",
        ("same seed",),
        ("What does the seed do?", "How do I set a seed?", "What is the seed for?", "How do seeds work?",
         "Is the output reproducible?", "Tell me about the seed.", "What is a seed?", "What does a seed do?"),
    ),
    Fact(
        "Give a JSON schema, a regex, a grammar or a list of choices, and the answer will follow it.",
        ("json schema", "grammar"),
        ("Can I get JSON output?", "How do I constrain the output?", "What are constraints?",
         "Does Penstock support JSON schema?", "How do I get structured output?", "Is there structured output?",
         "How can I constrain the answer?"),
    ),
    Fact(
        "Put stop strings in the request: generation ends as soon as one of them appears.",
        ("stop strings",),
        ("What are stop strings?", "How do I use stop strings?", "What is a stop string?", "Explain stop strings.",
         "How do stop strings work?", "Tell me about stop strings."),
    ),
    Fact(
        "Penstock is free software under the Apache License 2.0.",
        ("apache",),
        ("What is the licence of Penstock?", "Which license does Penstock have?", "Is Penstock free?",
         "Is Penstock open source?", "What license is it?", "Under which license is Penstock?"),
    ),
    Fact(
        "Use the Python package penstock_client, or generate a client from the protos for Go, Java, Node or C++.",
        ("penstock_client",),
        ("Which clients are there?", "How do I use Penstock from Python?", "Is there a Python client?",
         "How do I write a client?", "Which languages have a client?", "How do I call Penstock from Python?"),
    ),
    Fact(
        "If a backend dies, the router moves its requests to another one, and the client sees nothing of it.",
        ("moves",),
        ("What happens if a backend dies?", "What if a backend crashes?", "What happens when a backend is lost?",
         "Can Penstock survive a crash?", "What if a backend is lost?", "What happens when a backend dies?"),
    ),
    Fact(
        "When the queue is full, Penstock refuses early with RESOURCE_EXHAUSTED and says when to try again.",
        ("resource_exhausted",),
        ("What happens when the queue is full?", "What if there are too many requests?", "How is overload handled?",
         "What happens under overload?", "What does RESOURCE_EXHAUSTED mean?", "What if the queue is full?"),
    ),
)  # fmt: skip

LONG_FACTS: tuple[Fact, ...] = (
    Fact(
        "A request takes these steps:\n1. The client sends it to the router.\n2. The tokenizer renders the chat "
        "template and returns token ids.\n3. The router picks the backend with the longest cached prefix.\n4. The "
        "generation service schedules it with all the others.\n5. The model makes one token per step.\n6. The "
        "tokenizer turns the ids into text.\n7. The router streams the text to the client.\n8. At the end comes "
        "Finished, with the reason and the usage.",
        ("1.", "router", "finished"),
        ("What happens to a request?", "Explain how a request is served.", "How is a request served?",
         "What steps does a request take?", "Explain step by step how Penstock works.", "How does Penstock work?",
         "Explain how Penstock works.", "Explain step by step how a request is served."),
    ),
    Fact(
        "Penstock is a server for language models. A client sends text or chat messages to the router over gRPC. The "
        "tokenizer service turns them into token ids, and the generation service runs the model. All requests share "
        "one paged KV pool and are batched continuously, so short answers never wait for long ones. Text is streamed "
        "back token by token. Every service has health checks, metrics and reflection, and the whole runs on CPU, "
        "CUDA and Ascend NPU.",
        ("router", "tokenizer", "streamed", "ascend"),
        ("Explain Penstock in detail.", "Tell me everything about Penstock.", "Describe Penstock in detail.",
         "Give me a long description of Penstock.", "Write a paragraph about Penstock.",
         "Explain Penstock at length.", "Tell me about Penstock in detail."),
    ),
    Fact(
        "Water runs down from the hill,\nthe gate is open, never still.\nThrough the pipe the stream will go,\n"
        "token by token, in a row.\nThe turbine turns, the light is on,\nand soon the waiting queue is gone. 🌊",
        ("water", "turbine"),
        ("Write a poem.", "Write a poem about Penstock.", "Write me a short poem.", "Tell me a poem.",
         "Can you write a poem?", "Make a poem about water.", "Can you write me a poem?"),
    ),
    Fact(
        "Once upon a time there was a small stream in the mountains. Every day it ran past an old mill. One day the "
        "miller built a gate and a pipe. \"Now you can turn my wheel,\" he said. The stream was happy, for it had "
        "work to do, and at night the whole village had light. The end. ✨",
        ("once upon a time", "the end"),
        ("Tell me a story.", "Write a story.", "Can you tell me a story?", "Write me a short story.",
         "Please tell me a story.", "I would like to hear a story.", "Can you write a story?"),
    ),
)  # fmt: skip

CHINESE_FACTS: tuple[Fact, ...] = (
    Fact(
        "Penstock 是一个语言模型服务器。它通过 gRPC 提供 generate()，并把所有请求连续地放进同一个批次。🚀",
        ("语言模型服务器",),
        ("什么是 Penstock？", "Penstock 是什么？", "请介绍一下 Penstock。", "介绍 Penstock", "请问 Penstock 是什么？"),
    ),
    Fact(
        "Penstock 有三个服务：路由器、分词器和生成服务。",
        ("路由器", "分词器", "生成服务"),
        ("Penstock 有哪些服务？", "有哪三个服务？", "Penstock 有几个服务？", "请列出三个服务。",
         "请问 Penstock 有哪些服务？"),
    ),
    Fact(
        "我是 Penstock 的演示模型，一个很小的语言模型。🤖",
        ("演示模型",),
        ("你是谁？", "你叫什么名字？", "你是什么模型？", "请介绍一下你自己。", "请问你是谁？"),
    ),
    Fact(
        "我会聊 Penstock，会加法和减法，会换算单位，还会拼写单词。",
        ("加法", "单位"),
        ("你会做什么？", "你能做什么？", "你会什么？", "你可以帮我做什么？", "请问你会做什么？"),
    ),
    Fact(
        "水从山上流下来，穿过管道，推动水轮机，点亮了整个村庄。夜里，星星很亮，小河还在唱歌。🌙✨",
        ("水轮机", "村庄"),
        ("请讲一个故事。", "给我讲个故事。", "讲一个小故事", "你会讲故事吗？", "请给我讲一个故事。"),
    ),
    Fact(
        "Penstockは言語モデルのサーバーです。三つのサービスがあり、テキストを少しずつ送ります。🌸",
        ("サーバー",),
        ("Penstockとは何ですか？", "Penstockって何？", "Penstockについて教えてください。", "Penstockは何ですか？"),
    ),
)  # fmt: skip
