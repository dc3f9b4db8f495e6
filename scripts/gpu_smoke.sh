#!/usr/bin/env bash
# What only a machine with a GPU can show, in under eight minutes on one: a swap, the scatter of a delta, the codec's
# planes on the device, and one short run served by vLLM. Run it in an environment that has `vllm` and paceline[train]:
#
#     scripts/gpu_smoke.sh [MODEL_DIRECTORY]        (default: the shipped model)
#
# It prints one line per check and ends with the table for docs/vllm.md. Nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
model="${1:-}"

"$python" - <<'PY'
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu_smoke: torch sees no GPU here")
print(f"gpu: {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
PY

timeout 90 "$python" scripts/gpu_checks.py planes
timeout 240 "$python" scripts/gpu_checks.py serving ${model:+--model "$model"}

started=$SECONDS
timeout 240 "$python" -c "from paceline.cli.main import entry_point; entry_point()" train \
    rollout.name=vllm rollout.num_replicas=1 ${model:+model.path="$model"} \
    rollout.engine_kwargs.vllm.gpu_memory_utilization=0.4 rollout.total_rollout_steps=1280 data.val_size=200 \
    trainer.save_freq=0 trainer.grace_seconds=0 trainer.default_local_dir="$work/runs"
echo "run: $((SECONDS - started)) s"
