#!/usr/bin/env bash
# Builds a wheel, installs it with [train] into a fresh environment and runs a very short training from an empty
# directory: what the wheel does not carry, the run cannot find.
set -euo pipefail

# Long enough to publish weights a few times, short enough for every CI run.
OVERRIDES=(
    rollout.total_rollout_steps=64
)
DEADLINE_SECONDS=300

root="$(cd "$(dirname "$0")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

mkdir "$work/source" "$work/empty"
cp -r "$root"/{pyproject.toml,README.md,LICENSE,paceline} "$work/source/"

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check --no-input)
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$work/dist" "$work/source"
wheel="$(echo "$work"/dist/paceline-*.whl)"
"${pip[@]}" install --quiet --no-compile "$(grep '^torch==' "$root/constraints.txt")"
"${pip[@]}" install --quiet --constraint "$root/constraints.txt" "$wheel[train]"

cd "$work/empty"
status=0
timeout --kill-after=20 "$DEADLINE_SECONDS" "$work/venv/bin/paceline" train "${OVERRIDES[@]}" </dev/null || status=$?
if [ "$status" -ne 0 ]; then
    echo "wheel: paceline train exited with $status" >&2
    exit 1
fi
summary="$(find "$work/empty" -name summary.json -size +0 -print -quit)"
if [ -z "$summary" ]; then
    echo "wheel: the run left no summary.json" >&2
    exit 1
fi
"$work/venv/bin/python" -m json.tool "$summary" /dev/null
echo "wheel: $(basename "$wheel") trains from an empty directory and leaves ${summary#"$work/empty/"}"
