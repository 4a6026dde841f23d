"""Let a torchvision of the package index load beside a torch for CPUs, in an environment of another engine.

    .../vllm-venv/bin/python tools/peer_torchvision.py

The package index has torchvision built for CUDA alone. Beside a torch for CPUs its operators do not load, and the
import ends at the first one that it describes without looking for it. vLLM imports its image classes with the text
models of Qwen3.5 and Gemma 4, and uses no operator of theirs for a text. So the two operators are declared there.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_DECLARED = """
# Added by Penstock's tools/peer_torchvision.py: this torch has none of torchvision's operators.
_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""
_BEFORE = "@functools.lru_cache(None)"


def main() -> None:
    """Declare them. Raises SystemExit where there is no torchvision, or one of another form."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise SystemExit("this environment has no torchvision")
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text = file.read_text()
    if _DECLARED in text:
        return
    if _BEFORE not in text:
        raise SystemExit(f"{file}: another form than torchvision 0.28's")
    file.write_text(text.replace(_BEFORE, _DECLARED.lstrip() + "\n" + _BEFORE, 1))


if __name__ == "__main__":
    main()
