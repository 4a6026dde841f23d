"""Every command of `penstock`: `penstock --help`, the import of a command, suggestions and the reference read it."""

from __future__ import annotations

from dataclasses import dataclass

SERVE, ASK, MODELS, SERVICES, MACHINE = "Serve", "Ask", "Models", "Running services", "This machine"


@dataclass(frozen=True, slots=True)
class CommandRow:
    """A command, or a group of commands."""

    name: str
    # Heading in `penstock --help`.
    group: str
    # `module:attribute` of its typer.Typer below penstock.cli, imported when the command is called.
    target: str
    # One line; a command that needs more has a text of its own.
    help: str


COMMANDS = (
    CommandRow("serve", SERVE, "serve.commands:commands", "Serve a model: everything ([MODEL]), or one service of it."),
    CommandRow(
        "demo",
        SERVE,
        "demo:commands",
        "Start everything on a model, the embedded one or MODEL, show one answer and its timings, stop.",
    ),
    CommandRow("chat", ASK, "client.chat:chat", "Ask a model a question, or talk to it."),
    CommandRow("complete", ASK, "client.chat:complete", "Continue a text, and write it to standard output."),
    CommandRow(
        "infer",
        ASK,
        "infer.command:commands",
        "Answer a file of prompts, or converse: the flags and defaults of inference_hf.py, and ours.",
    ),
    CommandRow(
        "bench", ASK, "bench.command:commands", "Put load on a server, and tell times, throughput and failures."
    ),
    CommandRow("watermark", ASK, "client.watermark:commands", "Watermarks of generated text."),
    CommandRow(
        "download", MODELS, "download:commands", "Download what serving a model needs from a hub, and verify it."
    ),
    CommandRow(
        "inspect", MODELS, "inspect_model:commands", "Show what a model is, what it takes, and whether it starts here."
    ),
    CommandRow(
        "pack",
        MODELS,
        "pack:commands",
        "Write a model's weights as the C++ kernels read them: starts take less time and memory.",
    ),
    CommandRow(
        "eval",
        MODELS,
        "evaluate.eval_command:commands",
        "Measure how near number formats, or a server, are to a reference on a text.",
    ),
    CommandRow(
        "quantize",
        MODELS,
        "quantize:commands",
        "Write a model with weights of 4 bits, fitted to a calibration text, in a layout that other engines have.",
    ),
    CommandRow("models", MODELS, "client.models:commands", "Load, unload and show a generation service's model."),
    CommandRow("adapters", MODELS, "adapters:commands", "LoRA adapters of a running generation service."),
    CommandRow(
        "health", SERVICES, "health:commands", "Ask servers whether they are ready; exit code 0 when all are SERVING."
    ),
    CommandRow("debug", SERVICES, "debug:commands", "Look inside a running service, and at traces of requests."),
    CommandRow("admin", SERVICES, "admin_commands:commands", "Drain, pause, resume and reload a generation service."),
    CommandRow(
        "keys", SERVICES, "keys.keys_command:commands", "Keys of callers: make, list and revoke them, show their use."
    ),
    CommandRow("env", MACHINE, "env:commands", "Versions, CPU, memory and devices: what a bug report needs."),
    CommandRow(
        "doctor",
        MACHINE,
        "kernels:doctor_command",
        "Run a device's operators beside the CPU's in float32; exit code 1 where one fails or gives other numbers.",
    ),
    CommandRow(
        "build-kernels",
        MACHINE,
        "kernels:build_command",
        "Compile the C++ kernels, once for each version of them and of the compiler. Needs g++.",
    ),
)
