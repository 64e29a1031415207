#!/usr/bin/env bash
# Benchmarks LEV, loss, table and optimizer steps (tokens/s, MFU, tied against leviathan) on one GPU at
# the paper's three sizes, in less than 8 minutes.
#
#   benchmarks/gpu.sh [OUT]      JSON lines go to OUT (default: benchmarks/out) and a table to stdout
#
# PYTHON names the interpreter (default: .venv/bin/python if it exists, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/out}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "error: benchmarks/gpu.sh requires a CUDA device, but torch finds none." >&2
  echo "       On the CPU: make bench" >&2
  exit 2
fi
mkdir -p "$out"
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)' | tee "$out/device.txt"

# Test the kernels first: if they fail, the results below are meaningless.
timeout 90 "$python" -m pytest -q -p no:cacheprovider tests/gpu || echo "warning: tests/gpu did not pass" >&2

failed=0
run() {  # seconds, name, arguments: a failed benchmark does not stop the others
  local limit=$1 name=$2; shift 2
  if ! timeout "$limit" "$python" "benchmarks/$name.py" --device cuda --json "$@" > "$out/$name.jsonl"; then
    echo "warning: benchmarks/$name.py failed or took more than $limit s" >&2
    failed=1
  fi
}
run 90 lev --rounds 20
run 60 materialize --rounds 10
run 60 loss --rounds 10
run 150 step --rounds 20
"$python" benchmarks/harness.py "$out"/{lev,materialize,loss,step}.jsonl
exit $failed
