#!/usr/bin/env bash
# What only a machine with a GPU can show, in under eight minutes on one: the codec's planes on the device, swaps and the
# scatter of what differs under generation, and one short run served by vLLM. Run it in an environment that has `vllm`
# and paceline[train]:
#
#     scripts/gpu_smoke.sh [MODEL_DIRECTORY]        (default: the shipped model)
#
# It ends with the table for docs/vllm.md, or at the first check that fails, with its reason. Nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
model="${1:-}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'PY'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu_smoke: torch sees no GPU here")
print(f"gpu: {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
PY

check() { # SECONDS ARGUMENTS...
    timeout --kill-after=5 "$1" "$python" scripts/gpu_checks.py "${@:2}" | tee -a "$work/table"
}

check 60 planes
check 200 serving ${model:+--model "$model"}

# bfloat16: not every attention kernel of a GPU has float32.
timeout --kill-after=5 190 "$python" -c "from paceline.cli.main import entry_point; entry_point()" train \
    rollout.name=vllm rollout.num_replicas=1 rollout.dtype=bfloat16 ${model:+model.path="$model"} \
    rollout.engine_kwargs.vllm.gpu_memory_utilization=0.4 rollout.total_rollout_steps=1280 data.val_size=200 \
    trainer.save_freq=0 trainer.grace_seconds=0 trainer.default_local_dir="$work/runs"
check 20 run --directory "$work/runs"

printf '\n| on a GPU | |\n|---|---|\n'
cat "$work/table"
