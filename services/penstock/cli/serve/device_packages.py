"""A look at the installed packages for --device, without an import of torch: it takes seconds."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from penstock.common.errors import StartupError

# torch/version.py says what torch was built with: CUDA, or HIP, which has its devices by CUDA's name.
_WITHOUT_CUDA = re.compile(r"^cuda\b[^=\n]*= None$", re.MULTILINE)
_WITH_HIP = re.compile(r"^hip\b[^=\n]*= ['\"]", re.MULTILINE)


def check_device_packages(device: str) -> None:
    """Raise StartupError naming --device where the installed packages cannot have it.

    Where that is not certain, the device itself finds out at its start.
    """
    kind = device.partition(":")[0]
    if kind == "cuda" and _lacks_cuda():
        raise StartupError(
            f"--device {device} needs a torch with CUDA: this one is {metadata.version('torch')} (the extra [cuda])",
            flag="--device",
        )
    if kind == "npu" and find_spec("torch_npu") is None:
        raise StartupError(
            f"--device {device} needs torch-npu, which is not installed (the extra [npu])", flag="--device"
        )


def _lacks_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return _WITHOUT_CUDA.search(text) is not None and _WITH_HIP.search(text) is None
