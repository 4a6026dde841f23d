#!/usr/bin/env bash
# Check the CUDA backend on a machine with a GPU: the device, every operator beside the CPU's, greedy ids, decoding.
# Ten minutes at most. Needs a checkout with penstock[cuda,tokenizer,router] installed; writes gpu-check.md.
#
#   tools/gpu_check.sh [MODEL]     MODEL: a folder or hub id; the embedded model when left out
set -uo pipefail
cd "$(dirname "$0")/.."
model=${1:-}
out=gpu-check.md
failed=0

say() { printf '%s\n' "$*" | tee -a "$out"; }

run() { # title, command
  local title=$1
  shift
  say "" "## $title" "" '```'
  timeout 300 "$@" 2>&1 | tee -a "$out"
  local code=${PIPESTATUS[0]}
  say '```'
  if ((code)); then
    failed=1
    say "**failed: exit code $code**"
  fi
}

: >"$out"
say "# The CUDA backend on a GPU" "" "$(date -u +%Y-%m-%d), $(git rev-parse --short HEAD 2>/dev/null || echo no checkout)"
run "Device" python -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))"
for dtype in bfloat16 float16 float32; do
  run "Operators in $dtype" penstock doctor --device cuda --dtype "$dtype"
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for device in cpu cuda; do
  run "Greedy answers on $device, float32" penstock infer ${model:+--base-model "$model"} --data-file examples/prompts.txt --max-new-tokens 32 --no-do-sample \
    --device "$device" --dtype float32 --predictions-file "$folder/$device.json"
done
run "The same ids" cmp "$folder/cpu.json" "$folder/cuda.json"
run "Decoding in bfloat16" penstock infer ${model:+--base-model "$model"} --data-file examples/prompts.txt --max-new-tokens 256 \
  --device cuda --dtype bfloat16 --predictions-file "$folder/bf16.json"
say "" "$( ((failed)) && echo 'Something failed.' || echo 'All of it passed.')"
exit "$failed"
