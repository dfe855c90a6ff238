# compute-sanitizer over the kernel tests, several processes at once; each stops after SECONDS of tests and says how many ran.
# bash tests/gpu/sanitize.sh [SECONDS]; logs under $OUT. Calls that fail are no errors of kernels: cuGetProcAddress is asked for
# what a driver may lack.
seconds=${1:-80} out=${OUT:-/tmp}
declare -A apis=([memcheck]="--report-api-errors no" [racecheck]="--racecheck-report all")
options="-q -p no:cacheprovider -o filterwarnings=default"
check() {  # name, tool, part, parts, pytest arguments: every PARTS-th test from PART on
    local name=$1 tool=$2 part=$3 parts=$4 log=$out/$2-$1.log
    shift 4
    [ "$parts" = 1 ] || log=$out/$tool-$name-$part.log
    python3 -m pytest $options --collect-only "$@" 2>/dev/null | grep :: | awk "NR % $parts == $part % $parts" >"$log.tests"
    timeout $((seconds + 60)) compute-sanitizer --tool "$tool" ${apis[$tool]} python3 -m pytest $options --session-timeout="$seconds" \
        "@$log.tests" >"$log" 2>&1
    echo "$tool $name $part/$parts: $(grep -a -E 'SUMMARY' "$log" | tail -1), $(grep -a -E ' (passed|failed)' "$log" | tail -1)" \
        "of $(wc -l <"$log.tests")"
    rm -f "$log.tests"
}
for part in 1 2 3 4; do check engine racecheck $part 4 tests/gpu/test_engine.py -k "vectors or agrees or split or rolling_cache" & done
for part in 1 2; do check engine memcheck $part 2 tests/gpu/test_engine.py -k "vectors or agrees or split or rolling_cache" & done
for part in 1 2; do check matvec racecheck $part 2 tests/gpu/test_matvec.py -k "not 33001 and not 40960" & done
check matvec memcheck 1 1 tests/gpu/test_matvec.py -k "not 33001 and not 40960" &
check sampling memcheck 1 1 tests/gpu/test_sampling.py -k "same_bits or samplers" &
check sampling racecheck 1 1 tests/gpu/test_sampling.py -k "same_bits or samplers" &
wait
