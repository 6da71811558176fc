#!/usr/bin/env bash
# The proof on a machine with a GPU that is lent for half an hour: three runs, in this order, each within its limit.
#
#     benchmark/gpu_hour.sh [--toy|--emulated] NUMBER [OUT]
#
#   1  memory      520 s   versions, host memory, pinning and copying; builds the kernel of CPU Adam; tests on CUDA; memory
#   2  resident    380 s   links, then resident
#   3  offload     580 s   GPT-2 4B in 20 GB, the same clipped in every step, in 80 GB; capacity, or a row that says why not
#
# Each ends by comparing simulated with measured steps. With a start of 90 s before each that is 1,750 s.
#
# The machine may be emptied between runs. So put proof.tar.xz (.gz if there is no xz) of one run's OUT into out/, and
# send it along with the next: a run that finds no rows unpacks it, and all results add up in out/gpu_proof. Without it,
# plans are made for a preset and nothing is compared. To go on by hand, unpack it in out/.
#
# OUT, or $OUT, is the folder that gets the results: rows.jsonl, results.md, hardware.json, log.txt and everything else in
# the archive; five files, none above 16 MiB. All are written anew after each case, so a run that is killed loses the case
# that it was at. Then compare what is there: gpu_proof.py --compare --out out/gpu_proof.
#
# --toy runs toys on the CPU, --emulated toys of the real jobs on the emulated device of the tests: to see that the runs
# work. $HOST_MEMORY is what jobs may plan with, 104GiB unless it is given: less where run 1 says that less is there. A
# fresh machine may report little, since its memory grows as it is touched. $SECONDS_GIVEN changes the limit of a run,
# $PYTHON the interpreter, $WORK the folder of the results. If this script is killed, whatever it has started ends.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

toy=''
case ${1:-} in --toy|--emulated) toy=${1#--}; shift ;; esac
command=${1:-}
out=${2:-${OUT:-}}
case $command in [1-3]) ;; *) usage ;; esac
if [ -z "$out" ]; then echo 'give a folder for the results: the second argument, or $OUT' >&2; exit 2; fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2

limits=(520 380 580)
limit=${SECONDS_GIVEN:-${limits[command - 1]}}
host_memory=${HOST_MEMORY:-104GiB}
python=${PYTHON:-}
if [ -z "$python" ]; then if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi; fi
work=${WORK:-out/gpu_${toy:+${toy}_}proof}
mkdir -p "$work" && work=$(cd "$work" && pwd) || exit 2
most=${ARCHIVE_BYTES:-$((16 * 1024 * 1024))}
archive=$out/proof.tar.xz compress=(xz -T0 -3)
if ! command -v xz > /dev/null; then archive=$out/proof.tar.gz; compress=(gzip); fi

for carried in "${work%/*}"/proof.tar.xz "${work%/*}"/proof.tar.gz; do
    if [ -f "$carried" ] && [ ! -f "$work/rows.jsonl" ]; then
        tar -C "${work%/*}" -xf "$carried" || exit 2
        echo "goes on from $carried"
    fi
done

# A machine that is lent may have no network, and must not look for one. The kernel of CPU Adam is kept with the results;
# where DeepSpeed is installed, it compiles once.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/out/extensions}
if [ "$toy" = emulated ]; then  # which takes a minute to compile
    mkdir -p "$work/cache" && ln -sfn "${XDG_CACHE_HOME:-$HOME/.cache}/elixir-tests" "$work/cache/elixir-tests"
fi
export XDG_CACHE_HOME=$work/cache

child=''
copier=''

# Everything that is worth keeping, in few and small files. Plans and traces are left out before the archive is too large.
keep() {
    local name part=$out/.$BASHPID.part
    for name in rows.jsonl results.md hardware.json; do
        if [ -f "$work/$name" ]; then head -c "$most" "$work/$name" > "$out/$name"; fi
    done
    tail -c $((1024 * 1024)) "$work/log.txt" > "$out/log.txt" 2>/dev/null || rm -f "$out/log.txt"
    name=${work##*/}
    for without in '' "$name/plans/*.trace.json" "$name/plans"; do
        tar -C "${work%/*}" -c --exclude=elixir-tests ${without:+--exclude="$without"} "$name" 2>/dev/null | nice "${compress[@]}" > "$part"
        if [ "$(wc -c < "$part")" -le "$most" ]; then mv "$part" "$archive"; return; fi
    done
    rm -f "$part" "$archive"
    echo "no archive: even without plans it is larger than $most bytes; the files next to it have the rows" >&2
}

pack() {
    if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then wait "$child" 2>/dev/null; fi
    if [ -n "$copier" ]; then kill "$copier" 2>/dev/null; wait "$copier" 2>/dev/null; fi
    rm -f "$out"/.*.part
    keep
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

# The entry of the proof, and what it is to be given so that it runs toys.
entry=(benchmark/gpu_proof.py)
case $toy in toy) entry+=(--rehearse) ;; emulated) entry=(tests/common/toy_proof.py) ;; esac

# This run's part of the proof, in the time that is left. A process that the driver holds may keep this script past any
# limit, so results leave after each row: while the next case is still loading its model.
proof() {
    local left=$((limit - SECONDS - 30)) minutes now seen=''
    if [ "$left" -lt 1 ]; then echo "no time is left of $limit s" >&2; return 1; fi
    printf -v minutes '%d.%02d' $((left / 60)) $((left % 60 * 100 / 60))
    (while sleep "${COPY_EVERY:-2}" && kill -0 $$; do
        now=$(wc -c < "$work/rows.jsonl")
        if [ "$now" != "$seen" ]; then seen=$now; keep; fi
    done) > /dev/null 2>&1 &
    copier=$!
    within $((left + 15)) "$python" "${entry[@]}" --out "$work" --hour "$command" --minutes "$minutes" \
        --host-memory "$host_memory"
}

facts() {
    if command -v nvidia-smi > /dev/null; then nvidia-smi; nvidia-smi --query-compute-apps=pid,used_memory --format=csv; fi
    echo "locked memory: $(ulimit -l); processors: $(nproc)"
    lscpu | grep -E 'Model name|NUMA|L3|Thread'
    free -g | head -2
    cat /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/memory.max 2>/dev/null
    local status=0 size=$host_memory tests=(--cuda tests/gpu --ignore=tests/gpu/test_peaks.py)
    if [ -n "$toy" ]; then size=64MiB tests=(tests/gpu/test_pinning.py); fi
    if [ "$toy" = emulated ]; then tests+=(--cuda); fi
    within 120 "$python" "${entry[@]}" --probe "$size" || status=1
    # Interrupted rather than ended: pytest then tells of what has failed so far. The proof goes on whatever they say.
    within 110 timeout -s INT 100 "$python" -m pytest -q --tb=short -p no:cacheprovider "${tests[@]}" || status=1
    return "$status"
}

status=0
if [ "$command" -eq 1 ]; then
    facts > >(tee "$work/facts.txt") 2>&1 || status=1
fi
proof || status=1
exit "$status"
