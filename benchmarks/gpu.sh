#!/usr/bin/env bash
# The cost benchmarks on an NVIDIA GPU, in under eight minutes once Python and torch are there.
#
#   benchmarks/gpu.sh                 results in benchmarks/results/gpu/
#   OUT=DIR benchmarks/gpu.sh         results in DIR
#   PYTHON=PATH benchmarks/gpu.sh     with that interpreter, which needs a torch that sees the GPU
#
# Without PYTHON it takes the first of .venv/bin/python and python3 that can run, and else makes .venv from the
# pins with `make setup`. Every part has a time limit; one that fails or runs out is named at the end, and the
# others still run.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
# Deterministic matrix products, which the tests ask for.
export CUBLAS_WORKSPACE_CONFIG=:4096:8
OUT="${OUT:-benchmarks/results/gpu}"
mkdir -p "$OUT"

ready() {
    "$1" -c 'import pydantic, scipy, torch, twinscope; assert torch.cuda.is_available()' 2>/dev/null
}
if [ -z "${PYTHON:-}" ]; then
    for candidate in .venv/bin/python python3; do
        if command -v "$candidate" >/dev/null && ready "$candidate"; then PYTHON="$candidate"; break; fi
    done
fi
if [ -z "${PYTHON:-}" ]; then
    make setup || exit 1
    PYTHON=.venv/bin/python
fi
if ! ready "$PYTHON"; then
    echo "gpu.sh: $PYTHON has no torch that sees a GPU, or lacks this package's dependencies: set PYTHON" >&2
    exit 2
fi

failed=()
part() { # part NAME SECONDS COMMAND...
    local name="$1" seconds="$2"
    shift 2
    echo "== $name"
    timeout "$seconds" "$@" 2> >(grep -v '^USDT:' >&2) | tee "$OUT/$name.txt"
    local code="${PIPESTATUS[0]}"
    [ "$code" = 0 ] || failed+=("$name (exit $code)")
}

nvidia-smi --query-gpu=name,driver_version,memory.total,utilization.gpu --format=csv 2>/dev/null | tee "$OUT/gpu.txt"
part tests 100 "$PYTHON" -m pytest -q -p no:cacheprovider tests/propagation/test_on_cuda.py
part cost-amp 120 "$PYTHON" benchmarks/cost.py --device cuda --precision amp --shape 12x768x256x24 \
    --windows 4 --steps 8 --compile --out "$OUT/cost-amp.json"
part cost-fp32 120 "$PYTHON" benchmarks/cost.py --device cuda --shape 12x768x256x8 \
    --windows 4 --steps 6 --out "$OUT/cost-fp32.json"
part below-floor 120 "$PYTHON" benchmarks/below_floor.py --device cuda --width 768 --context 256 --batch 8 \
    --steps 100 --sweeps 4 --out "$OUT/below_floor.json"

if [ "${#failed[@]}" -gt 0 ]; then
    echo "did not finish: ${failed[*]}"
    exit 1
fi
