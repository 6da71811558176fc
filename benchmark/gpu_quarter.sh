#!/usr/bin/env bash
# The proof on a machine with a GPU that is lent for a quarter of an hour, without a network: two runs, the second at once
# after the first, and before them what needs no GPU.
#
#     benchmark/gpu_quarter.sh [--emulated] prepare
#     benchmark/gpu_quarter.sh [--emulated] NUMBER [OUT]
#
#   prepare           fills out/quarter_carry, 64 MiB at most, to be sent along: plans and traces of all runs of Elixir for
#                     an H100 and an H200, and wheels of the peers with DeepSpeed's CPU Adam compiled. What is there and up
#                     to date stays. Needs the Python, torch and transformers of the lent machine, and a network for wheels
#   1  decisive 560 s CPU Adam next to copies, bits of torch's Adam, storages in a pool; then the pairs that decide most
#   2  last     180 s tests on CUDA; then steps without clipping, or on an H100 its rates
#
# Rows are written one by one. OUT, or $OUT, is the folder that gets the results: rows.jsonl, results.md, hardware.json,
# log.txt, facts.txt and proof.tar.xz (.gz if there is no xz), which has everything; none above 16 MiB. All are written anew
# after each case, so a run that is killed loses the case that it was at. What did not travel is left out or made there.
#
# Put proof.tar.xz into out/ to go on on another machine, or only its pytest_cache into out/quarter_carry: tests that failed
# last then run first. --emulated runs toys of the real jobs on the emulated device of the tests. $HOST_MEMORY is what jobs
# may plan with, 104GiB unless it is given, also while plans are prepared. $CARD (h100 or h200), $SECONDS_GIVEN (limit of a
# run), $PYTHON and $WORK (folder of the results) change what is found. If this script is killed, all it has started ends.
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

toy=''
if [ "${1:-}" = --emulated ]; then toy=emulated_; shift; fi
command=${1:-}
out=${2:-${OUT:-}}
case $command in prepare) out=${out:-.} ;; [12]) ;; *) usage ;; esac
if [ -z "$out" ]; then echo 'give a folder for the results: the second argument, or $OUT' >&2; exit 2; fi
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2

limits=(560 180)
host_memory=${HOST_MEMORY:-104GiB}
python=${PYTHON:-}
if [ -z "$python" ]; then if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi; fi
work=${WORK:-out/gpu_${toy}quarter}
carry=${work%/*}/quarter_carry
entry=(benchmark/gpu_proof.py)
if [ -n "$toy" ]; then entry=(tests/common/toy_proof.py); fi
mkdir -p "$work" "$carry" && work=$(cd "$work" && pwd) && carry=$(cd "$carry" && pwd) || exit 2
# For processors with AVX-512, and for this torch alone.
compiled=$carry/compiled_$("$python" -c 'from importlib.metadata import version; print(version("torch").split("+")[0])')

export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/out/extensions}

wheels() {
    local pip=("$python" -m pip) deepspeed=deepspeed==0.19.8
    mkdir -p "$carry/wheels"
    if [ ! -f "$carry/wheels/"deepspeed-*.whl ]; then
        DS_BUILD_OPS=0 "${pip[@]}" wheel -q --no-build-isolation --no-deps --no-binary=:all: -w "$carry/wheels" $deepspeed
        "${pip[@]}" download -q --only-binary=:all: -d "$carry/wheels" hjson pydantic py-cpuinfo
        "${pip[@]}" download -q --only-binary=:all: --no-deps -d "$carry/wheels" torchao==0.18.0
    fi
    if [ ! -f "$compiled/"deepspeed-*.whl ]; then  # compiling takes half a minute, here rather than there
        printf '#!/bin/bash\nexec g++ "${@/-march=native/-march=x86-64-v4}"\n' > "$carry/cxx" && chmod +x "$carry/cxx"
        CC=$carry/cxx CXX=$carry/cxx DS_ACCELERATOR=cuda DS_BUILD_OPS=0 DS_BUILD_CPU_ADAM=1 "${pip[@]}" wheel -q \
            --no-cache-dir --no-build-isolation --no-deps --no-binary=:all: -w "$compiled" $deepspeed
    fi
}

if [ "$command" = prepare ]; then
    status=0
    "$python" "${entry[@]}" --prepare "$carry" --host-memory "$host_memory" || status=1
    if [ -z "$toy" ]; then wheels || status=1; fi
    du -sm "$carry"
    if [ "$(du -sm "$carry" | cut -f 1)" -gt 64 ]; then echo "$carry is larger than 64 MiB" >&2; status=1; fi
    exit "$status"
fi

limit=${SECONDS_GIVEN:-${limits[command - 1]}}
most=${ARCHIVE_BYTES:-$((16 * 1024 * 1024))}
archive=$out/proof.tar.xz compress=(xz -T0 -3)
if ! command -v xz > /dev/null; then archive=$out/proof.tar.gz; compress=(gzip); fi

for carried in "${work%/*}"/proof.tar.xz "${work%/*}"/proof.tar.gz; do
    if [ -f "$carried" ] && [ ! -f "$work/rows.jsonl" ]; then
        tar -C "${work%/*}" -xf "$carried" || exit 2
        echo "goes on from $carried"
    fi
done
if [ -d "$carry/pytest_cache" ] && [ ! -d "$work/pytest_cache" ]; then cp -r "$carry/pytest_cache" "$work"; fi

if [ -n "$toy" ]; then  # the device takes a minute to compile
    mkdir -p "$work/cache" && ln -sfn "${XDG_CACHE_HOME:-$HOME/.cache}/elixir-tests" "$work/cache/elixir-tests"
fi
export XDG_CACHE_HOME=$work/cache

child=''
copier='' seen=''

# Everything that is worth keeping, in few and small files. Plans and traces are left out before the archive is too large.
keep() {
    local name part=$out/.$BASHPID.part
    for name in rows.jsonl results.md hardware.json facts.txt; do
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
    # Not TERM: a shell that has just been forked may lose it, and would copy for as long as this one waits.
    if [ -n "$copier" ]; then kill -KILL "$copier" 2>/dev/null; wait "$copier" 2>/dev/null; fi
    rm -f "$out"/.*.part
    keep
}
trap pack EXIT
trap 'exit 143' TERM INT HUP

# A command that ends after so many seconds, by force soon after, and with this script however that ends. Not in the
# foreground: bash acts on a signal only once what it waits for has ended.
within() {
    local limit=$1 status; shift
    echo "\$ $*"
    "$python" benchmark/proof/lifetime.py $$ $((limit + 60)) timeout -k 3 "$limit" "$@" &
    child=$!
    wait "$child"; status=$?
    child=''
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then echo "ended after the $limit s it was given" >&2; fi
    return "$status"
}

{
    if command -v nvidia-smi > /dev/null; then timeout 20 nvidia-smi; fi
    echo "locked memory: $(ulimit -l); processors: $(nproc)"
    lscpu
    free -g
    cat /sys/kernel/mm/transparent_hugepage/enabled /sys/fs/cgroup/memory.max
} > "$work/facts.txt" 2>&1
card=${CARD:-}
if [ -z "$card" ]; then if grep -q H100 "$work/facts.txt"; then card=h100; else card=h200; fi; fi

# Peers that travelled. Where their compiled code does not fit, the plain wheel compiles it at its first step.
site=${work%/*}/quarter_site
if [ -z "$toy" ] && [ -d "$carry/wheels" ] && [ ! -d "$site" ]; then
    install=("$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$site")
    within 60 "${install[@]}" "$carry/wheels"/*.whl
    if grep -q avx512vl /proc/cpuinfo && [ -d "$compiled" ]; then within 30 "${install[@]}" "$compiled"/*.whl; fi
fi
export PYTHONPATH=$PYTHONPATH:$site

# This run's jobs, in the time that is left, whatever has taken it. A process that the driver holds may keep this script
# past any limit, so results leave after each row: while the next case is still loading its model.
left=$((limit - SECONDS - 15))
if [ "$left" -lt 1 ]; then echo "no time is left of $limit s" >&2; exit 1; fi
printf -v minutes '%d.%02d' $((left / 60)) $((left % 60 * 100 / 60))
(while sleep "${COPY_EVERY:-2}" && kill -0 $$; do
    now=$(wc -c < "$work/rows.jsonl")
    if [ "$now" != "$seen" ]; then seen=$now; keep; fi
done) > /dev/null 2>&1 &
copier=$!
within $((left + 3)) "$python" "${entry[@]}" --out "$work" --quarter "$command" --card "$card" --carried "$carry" \
    --minutes "$minutes" --host-memory "$host_memory"
