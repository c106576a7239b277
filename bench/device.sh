#!/usr/bin/env bash
# What needs a GPU, most telling first: the loss benchmark at Qwen3-4B's shape, the device tests, then the other shapes.
# Results are written as they come, to bench/results/<gpu>/, and are there to be committed: name.txt is the output of
# what was done, name.failed.txt of what failed or was stopped after all its time (delete it to try again). What a call
# had no time for it lists, and the next call begins there. Wheels of small peers may lie in wheels/ (git ignores it);
# they are installed aside, without their dependencies, and what is missing is listed as absent.
#
#     bash bench/device.sh [seconds]     # all of it ends within so many (default 290)
#     PYTHON=python3.12 bash bench/device.sh     # default: .venv/bin/python where there is one, else python3
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/kernels:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
python=${PYTHON:-$python}
limit=${1:-290}
each=200 # seconds that one measurement may take: on a fresh machine the first compiles everything
grace=10 # seconds in which one that is stopped writes what it has
least=30 # seconds that one needs at least: with less left, none is begun

gpu=$($python -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || {
    echo "device.sh: no CUDA device that torch can use" >&2
    exit 1
}
out=bench/results/$gpu
mkdir -p "$out"
if compgen -G 'wheels/*.whl' >/dev/null; then
    site=$(mktemp -d)
    $python -m pip install --quiet --no-index --no-deps --target "$site" wheels/*.whl && export PYTHONPATH="$PYTHONPATH:$site"
fi

failed=() missed=()
run() { # name command...
    local name=$1 log=$out/$1 left=$((limit - grace - SECONDS)) status
    shift
    [ -e "$log.txt" ] && return
    if [ -e "$log.failed.txt" ]; then
        failed+=("$name")
        return
    fi
    if ((left < least)); then
        missed+=("$name")
        return
    fi
    echo "== $name (${SECONDS} s)"
    timeout --kill-after=$grace $((left < each ? left : each)) "$@" 2>&1 | tee "$log.partial"
    status=${PIPESTATUS[0]}
    if ((status == 0)); then
        mv "$log.partial" "$log.txt"
    elif ((left < each && (status == 124 || status == 137))); then # stopped before its time
        rm "$log.partial"
        missed+=("$name")
    else
        mv "$log.partial" "$log.failed.txt"
        failed+=("$name")
    fi
}
tests() { # name file: without the project's pytest settings and conftest, which want plugins that a GPU machine may lack
    run "$1" "$python" -m pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib -p no:cacheprovider -q \
        -m device "$2"
}
loss() { # name arguments...
    run "$1" "$python" bench/loss.py --device cuda --dtype bfloat16 --out "$out" --name "$@"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit --format=csv 2>/dev/null | tee "$out/gpu.txt"
qwen4b=(--d 2560 --v 151936) qwen14b=(--d 5120 --v 151936) llama8b=(--d 4096 --v 128256)
loss qwen3-4b --n 8192 "${qwen4b[@]}" --rounds 10 --warmup 2
tests test-paths tests/triton/test_paths.py
tests test-gradients tests/triton/test_gradient_error.py
loss qwen3-14b --n 8192 "${qwen14b[@]}" --rounds 5
loss qwen3-4b-ce --n 8192 "${qwen4b[@]}" --rounds 5 --loss ce
loss qwen3-4b-forward --n 8192 "${qwen4b[@]}" --rounds 5 --forward
loss qwen3-4b-sizes --n 1024 32768 16384 4096 2048 "${qwen4b[@]}" --rounds 3
loss qwen3-4b-peaked --n 8192 "${qwen4b[@]}" --rounds 5 --peaked
loss llama3-8b --n 8192 "${llama8b[@]}" --rounds 5
loss qwen3-4b-ragged --n 7777 "${qwen4b[@]}" --rounds 5 --ragged
loss qwen3-14b-forward --n 8192 "${qwen14b[@]}" --rounds 5 --forward
loss qwen3-14b-sizes --n 1024 32768 16384 4096 2048 "${qwen14b[@]}" --rounds 3
loss llama3-8b-sizes --n 1024 32768 16384 4096 2048 "${llama8b[@]}" --rounds 3

echo "== ${SECONDS} s: $out"
((${#missed[@]} == 0)) || echo "not reached, run it again: ${missed[*]}"
((${#failed[@]} == 0)) || { echo "failed or stopped (see their .failed.txt): ${failed[*]}" && exit 1; }
