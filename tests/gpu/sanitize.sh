# compute-sanitizer over the kernel tests, several processes at once; each stops after SECONDS of tests and says how many ran.
# bash tests/gpu/sanitize.sh [SECONDS]; logs under $OUT.
seconds=${1:-80} out=${OUT:-/tmp}
check() {  # name, tool, pytest arguments
    local name=$1 tool=$2
    shift 2
    timeout $((seconds + 40)) compute-sanitizer --tool "$tool" python3 -m pytest -q -p no:cacheprovider -o filterwarnings=default \
        --session-timeout="$seconds" "$@" >"$out/$tool-$name.log" 2>&1
    echo "$tool $name: $(grep -a -E 'SUMMARY' "$out/$tool-$name.log" | tail -1), $(grep -a -E ' (passed|failed)' "$out/$tool-$name.log" | tail -1)"
}
check engine memcheck tests/gpu/test_engine.py -k "vectors or agrees or split" &
check matvec memcheck tests/gpu/test_matvec.py -k "not 33001 and not 40960" &
check engine racecheck tests/gpu/test_engine.py -k "vectors or agrees or split" &
check matvec racecheck tests/gpu/test_matvec.py -k "not 33001 and not 40960" &
check sampling memcheck tests/gpu/test_sampling.py -k "same_bits or greedy" &
check sampling racecheck tests/gpu/test_sampling.py -k "same_bits or greedy" &
wait
