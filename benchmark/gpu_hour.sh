#!/usr/bin/env bash
# The proof on a machine with a GPU that is there for an hour: six commands, each within its limit, in this order.
#
#     benchmark/gpu_hour.sh [--toy] NUMBER [OUT]
#
#   1  facts and smoke     300 s   versions, memory, pinning and copying; tests on CUDA; the example. Mend what fails first.
#   2  links, resident     540 s   read the rates, and the resident ratio: below 0.98 profile one step of each
#   3  offload             580 s   pairs: GPT-2 4B in 20, 80 and 40 GB, then OPT-6.7b
#   4  capacity            480 s   last on this machine: it is what may exhaust the host
#   5  memory              480 s   may run on another machine: needs no accuracy of times
#   6  what is most open   360 s   further offload pairs, and the comparison of simulated with measured steps
#
# OUT, or $OUT, is the folder that gets the results: rows.jsonl, results.md, hardware.json, log.txt and everything else in
# proof.tar.xz (.gz where there is no xz); five files, none above 16 MiB. Rows are copied there while the proof runs, too.
# Work is kept in $WORK (out/gpu_proof), so that commands add up; to go on on another machine unpack the archive in the
# folder that holds $WORK.
#
# $SECONDS_GIVEN is what commands 2 to 6 may take, a minute less than their limit. In half an hour: 1; 2 with 300; 3 with
# 400; 5 with 240; 4 with 240.
#
# --toy runs toys on the CPU, to see that the commands work; its $WORK is out/gpu_toy_proof. $PYTHON is the interpreter; $HOST_MEMORY, such as 106GiB, is
# what jobs may plan with: give it where command 1 says that memory grows as it is touched. If this script is killed,
# whatever it has started ends as well.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

toy=''
if [ "${1:-}" = --toy ]; then toy=1; shift; fi
command=${1:-}
out=${2:-${OUT:-}}
case $command in [1-6]) ;; *) usage ;; esac
if [ -z "$out" ]; then echo 'give a folder for the results: the second argument, or $OUT' >&2; exit 2; fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2

work=${WORK:-out/gpu_${toy:+toy_}proof}
python=${PYTHON:-}
if [ -z "$python" ]; then if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi; fi
mkdir -p "$work" || exit 2
most=${ARCHIVE_BYTES:-$((16 * 1024 * 1024))}

# A machine that is lent may have no network, and must not look for one. Where DeepSpeed is installed, it compiles once.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo ELIXIR_COMPILE=0
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/out/extensions}

child=''
copier=''
copy_rows() {
    local name
    for name in rows.jsonl results.md hardware.json; do
        if [ -f "$work/$name" ]; then head -c "$most" "$work/$name" > "$out/$name"; fi
    done
    tail -c $((1024 * 1024)) "$work/log.txt" > "$out/log.txt" 2>/dev/null || rm -f "$out/log.txt"
}

# Everything that is worth keeping, in few and small files. Plans and traces are left out before the archive is too large.
pack() {
    if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then wait "$child" 2>/dev/null; fi
    if [ -n "$copier" ]; then kill "$copier" 2>/dev/null; wait "$copier" 2>/dev/null; fi
    copy_rows
    local folder name archive=$out/proof.tar.xz compress=(xz -T0 -3)
    if ! command -v xz > /dev/null; then archive=$out/proof.tar.gz; compress=(gzip); fi
    folder=$(dirname "$work"); name=$(basename "$work")
    for without in '' "$name/plans/*.trace.json" "$name/plans"; do
        tar -C "$folder" -c ${without:+--exclude="$without"} "$name" | "${compress[@]}" > "$archive"
        if [ "$(wc -c < "$archive")" -le "$most" ]; then return; fi
    done
    rm -f "$archive"
    echo "no archive: even without plans it is larger than $most bytes; the files next to it have the rows" >&2
}
trap pack EXIT
trap 'exit 143' TERM INT HUP

# A command that ends after so many seconds, and with this script however that ends. Not in the foreground: bash acts on a
# signal only once what it waits for has ended.
within() {
    local limit=$1 status; shift
    echo "\$ $*"
    "$python" benchmark/proof/lifetime.py $$ "$limit" "$@" &
    child=$!
    wait "$child"; status=$?
    child=''
    if [ "$status" -eq 142 ]; then echo "ended after the $limit s it was given" >&2; fi
    return "$status"
}

# Parts of the proof for so many seconds; a minute above that for what does not end by itself. A process that the driver
# holds may keep this script past any limit, so rows leave while it runs.
proof() {
    local parts=$1 seconds=${SECONDS_GIVEN:-$2} minutes
    printf -v minutes '%d.%02d' $((seconds / 60)) $((seconds % 60 * 100 / 60))
    (while sleep "${COPY_EVERY:-20}" && kill -0 $$; do copy_rows; done) > /dev/null 2>&1 &
    copier=$!
    set -- --out "$work" --only "$parts" --minutes "$minutes"
    if [ -n "${HOST_MEMORY:-}" ]; then set -- "$@" --host-memory "$HOST_MEMORY"; fi
    if [ -n "$toy" ]; then set -- "$@" --rehearse; fi
    within $((seconds + 60)) "$python" benchmark/gpu_proof.py "$@"
}

facts() {
    if command -v nvidia-smi > /dev/null; then nvidia-smi; nvidia-smi --query-compute-apps=pid,used_memory --format=csv; fi
    echo "locked memory: $(ulimit -l); processors: $(nproc)"
    lscpu | grep -E 'Model name|NUMA|L3|Thread'
    free -g | head -2
    cat /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/memory.max 2>/dev/null
    local status=0
    if [ -n "$toy" ]; then
        within 60 "$python" benchmark/gpu_proof.py --rehearse --probe 64MiB || status=1
        within 100 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_pinning.py || status=1
        within 120 "$python" example/train.py --model opt-125m --layers 2 --batch 2 --seq 16 --activation-checkpointing \
            --device-memory 400MiB --steps 6 || status=1
        return "$status"
    fi
    within 90 "$python" benchmark/gpu_proof.py --probe 16GiB || status=1
    # Interrupted rather than ended: pytest then tells of what has failed so far.
    within 120 timeout -s INT 110 "$python" -m pytest -q --cuda --tb=short -p no:cacheprovider tests/gpu \
        --ignore=tests/gpu/test_peaks.py || status=1
    within 75 "$python" example/train.py --model opt-1.3b --layers 8 --batch 4 --seq 512 --activation-checkpointing \
        --device-memory 3GiB --steps 8 || status=1
    return "$status"
}

case $command in
    1) facts > >(tee "$work/facts.txt") 2>&1 ;;
    2) proof links,resident 450 ;;
    3) proof offload 510 ;;
    4) proof capacity 420 ;;
    5) proof memory 420 ;;
    6) proof links,offload 300 ;;
esac
