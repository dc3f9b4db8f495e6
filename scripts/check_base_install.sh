#!/usr/bin/env bash
# Installs the base alone (no extras) into a fresh environment and imports the weight path there: the base must work
# where neither ray nor transformers exists, and must not load torch before tensors are asked for.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# A copy, so that the build leaves nothing in the checkout and takes nothing stale from it.
mkdir "$work/source"
cp -r "$root"/{pyproject.toml,README.md,LICENSE,paceline} "$work/source/"

"${PYTHON:-python3}" -m venv "$work/venv"
python="$work/venv/bin/python"
pip=("$python" -m pip --disable-pip-version-check --no-input install --quiet --no-compile)
"${pip[@]}" "$(grep '^torch==' "$root/constraints.txt")"
"${pip[@]}" --constraint "$root/constraints.txt" "$work/source"

cd "$work" # so that the installed package is imported, not the checkout
"$python" -I "$root/scripts/probe_base_install.py"
