#!/usr/bin/env bash
# Check the CUDA backend on a machine with a GPU, in ten minutes at most: the device, every operator beside the CPU's,
# ids of every mode beside the CPU's in float32, answers, and speed beside the device's own limits.
# Needs a checkout with penstock[cuda,tokenizer,router,dev] installed; writes gpu-check.md.
#
#   tools/gpu_check.sh [MODEL]     MODEL: a folder or hub id; the embedded model when left out
#   GPU_CHECK_MEASURE="--layers 8" tools/gpu_check.sh     arguments of tools/gpu_measure.py, here for a small GPU
set -uo pipefail
cd "$(dirname "$0")/.."
model=${1:-}
out=${GPU_CHECK_OUT:-gpu-check.md}
python=${PYTHON:-python}
failed=0
# Seconds that are left of ten minutes.
ends=$((SECONDS + 600))

say() { printf '%s\n' "$*" | tee -a "$out"; }

run() { # title, command
  local title=$1 left=$((ends - SECONDS))
  shift
  printf '%s\n' "" "## $title" "" '```' | tee -a "$out"
  timeout "$((left > 1 ? left : 1))" "$@" 2>&1 | tee -a "$out"
  local code=${PIPESTATUS[0]}
  say '```'
  if ((code)); then
    failed=1
    say "**failed: exit code $code**"
  fi
}

penstock() { "$python" -P -m penstock.cli.main "$@"; }

: >"$out"
say "# The CUDA backend on a GPU"
say ""
say "$(date -u +%Y-%m-%d), $(git rev-parse --short HEAD 2>/dev/null || echo no checkout)"
if ! found=$("$python" -c "import torch; assert torch.cuda.is_available(); print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))" 2>/dev/null); then
  say ""
  say "**There is no GPU here: torch $("$python" -c "import torch; print(torch.__version__)" 2>/dev/null || echo "is missing and so") sees none. Nothing was checked.**"
  exit 2
fi
run "Device" echo "$found"
export -f penstock
export python
for dtype in bfloat16 float16 float32; do
  run "Operators in $dtype" bash -c "penstock doctor --device cuda --dtype $dtype"
done
run "Triton's operators beside torch's" \
  "$python" -m pytest -q -p no:cacheprovider -n 4 tests/unit/generation/attention/test_gpu_operators.py
run "Ids of every mode in float32 beside the CPU's" \
  "$python" -m pytest -q -p no:cacheprovider -n 4 tests/numerics/engine/test_another_device.py
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for device in cpu cuda; do
  run "Greedy answers on $device, float32" bash -c 'penstock infer "$@"' - ${model:+--base-model "$model"} \
    --data-file examples/prompts.txt --max-new-tokens 32 --no-do-sample --device "$device" --dtype float32 \
    --predictions-file "$folder/$device.json"
done
run "The same ids" cmp "$folder/cpu.json" "$folder/cuda.json"
for quantization in none int8 int4 fp8; do
  run "Answers in bfloat16, quantization $quantization" bash -c 'penstock infer "$@"' - \
    ${model:+--base-model "$model"} --data-file examples/prompts.txt --max-new-tokens 64 --device cuda \
    --dtype bfloat16 --quantization "$quantization" --predictions-file "$folder/$quantization.json"
done
printf '%s\n' "" "## Speed" "" | tee -a "$out"
# shellcheck disable=SC2086
timeout "$((ends - SECONDS > 1 ? ends - SECONDS : 1))" "$python" tools/gpu_measure.py --device cuda:0 \
  --quantizations none,int8,int4,fp8 ${GPU_CHECK_MEASURE:-} 2>&1 | tee -a "$out"
code=${PIPESTATUS[0]}
if ((code)); then
  failed=1
  say ""
  say "**failed: exit code $code**"
fi
say ""
say "$( ((failed)) && echo 'Something failed.' || echo 'All of it passed.') $((SECONDS - ends + 600)) seconds."
exit "$failed"
