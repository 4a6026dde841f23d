"""Compare the pinned schemas of torch-npu's operators with those of a wheel, which is not installed for it:

pip download torch-npu --no-deps --dest build/npu
python tools/npu_schemas.py build/npu/torch_npu-*.whl            # exit code 1 where they differ
python tools/npu_schemas.py build/npu/torch_npu-*.whl --write    # pin those of this wheel
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from pathlib import Path

PINNED = Path(__file__).parents[1] / "tests" / "data" / "npu_schemas.json"
# What a paged engine uses, now or next.
OPERATORS = (
    *("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2", "npu_scatter_pa_kv_cache"),
    *("npu_rms_norm", "npu_add_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_top_k_top_p"),
    *("npu_quant_matmul", "npu_dynamic_quant", "npu_weight_quant_batchmatmul", "npu_convert_weight_to_int4pack"),
    *("npu_grouped_matmul", "npu_moe_gating_top_k_softmax", "npu_moe_init_routing_v2", "npu_moe_finalize_routing"),
    *("npu_dequant_swiglu_quant", "npu_add_rms_norm_quant", "npu_format_cast", "npu_apply_rotary_pos_emb"),
)
_FUNCTION = re.compile(r"^\s*(?:-\s+)?func:\s*(\w+)(\(.*)$", re.MULTILINE)


def schemas_of(wheel: Path) -> dict[str, str]:
    """Return the schema of every operator of OPERATORS that the wheel's own tables have, by name."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith(".yaml") or "/csrc/" not in name:
                continue
            for operator, rest in _FUNCTION.findall(archive.read(name).decode()):
                if operator in OPERATORS:
                    found[operator] = operator + rest.strip().strip('"')
    return dict(sorted(found.items()))


def differences(pinned: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return a line for each operator with different schemas, or that only one of the two has."""
    names = sorted(pinned.keys() | found.keys())
    return [
        f"{name}\n  pinned: {pinned.get(name, 'absent')}\n  wheel:  {found.get(name, 'absent')}"
        for name in names
        if pinned.get(name) != found.get(name)
    ]


def main() -> int:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true", help="pin the schemas of this wheel")
    options = parser.parse_args()
    found = schemas_of(options.wheel)
    version = options.wheel.name.split("-")[1]
    if options.write:
        PINNED.write_text(json.dumps({"torch_npu": version, "schemas": found}, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} schemas of torch-npu {version} in {PINNED}")
        return 0
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    lines = differences(pinned["schemas"], found)
    print("\n".join(lines) or f"all {len(found)} schemas of torch-npu {version} are those of {pinned['torch_npu']}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
