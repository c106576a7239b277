#!/usr/bin/env bash
# Everything that needs a GPU, in under five minutes on one: the device tests, then the loss benchmark at Qwen3's shapes.
# Results are written as they come, to bench/results/<gpu>/. Wheels of small peers may lie in wheels/ (git ignores it);
# they are installed aside, without their dependencies, and what is missing is listed as absent.
#
#     bash bench/device.sh [seconds]     # stops starting new measurements after so many (default 270)
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/kernels:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
limit=${1:-270}
each=120 # seconds after which one measurement is stopped

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

failed=0
run() { # name command...: its output to the screen and to $out/name.log, unless the time is up
    local name=$1
    shift
    if ((SECONDS > limit)); then
        echo "== $name: left out, ${SECONDS} s have passed" | tee "$out/$name.log"
        return
    fi
    echo "== $name (${SECONDS} s)"
    timeout --kill-after=10 "$each" "$@" 2>&1 | tee "$out/$name.log" || failed=1
}
loss() { # name arguments...
    run "$1" "$python" bench/loss.py --device cuda --dtype bfloat16 --out "$out" --name "$@"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit --format=csv 2>/dev/null | tee "$out/gpu.txt"
# Without the project's pytest settings, which name plugins that a bare GPU machine may lack.
run tests "$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q -m device \
    tests/triton/test_paths.py tests/triton/test_gradient_error.py
loss qwen3-4b --n 8192 --d 2560 --v 151936 --rounds 10 --warmup 2
loss qwen3-4b-peaked --n 8192 --d 2560 --v 151936 --rounds 10 --warmup 2 --peaked
loss qwen3-4b-ce --n 8192 --d 2560 --v 151936 --rounds 10 --warmup 2 --loss ce
loss qwen3-14b --n 8192 --d 5120 --v 151936 --rounds 5 --warmup 1
loss qwen3-4b-forward --n 8192 --d 2560 --v 151936 --rounds 10 --warmup 2 --forward
loss llama3-8b --n 8192 --d 4096 --v 128256 --rounds 5 --warmup 1
for n in 1024 32768; do
    loss "qwen3-4b-n$n" --n "$n" --d 2560 --v 151936 --rounds 5 --warmup 1
done
loss qwen3-4b-ragged --n 7777 --ragged --d 2560 --v 151936 --rounds 5 --warmup 1
loss qwen3-14b-forward --n 8192 --d 5120 --v 151936 --rounds 5 --warmup 1 --forward
echo "== done after ${SECONDS} s: $out"
exit $failed
