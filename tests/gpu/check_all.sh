# Everything that needs a GPU, about fifteen minutes on an H200 of 16 cores; the results lie under $OUT (default: here in gpu-results).
#
# Afterwards: cp $OUT/bench.jsonl notebooks/data/bench_results.jsonl && python -m tests.gpu.bench_table; cp $OUT/sessions/* notebooks/data/ &&
# python tests/notebook_tools.py --run; $OUT/verify-*.md are the tables of docs/measured/fidelity.md.
export OUT=${OUT:-$PWD/gpu-results}
mkdir -p "$OUT/sessions"
pytest="python3 -m pytest -q -o filterwarnings=default" # plugins of the machine warn
$pytest -n 8 tests/gpu 2>&1 | tail -12
$pytest tests/gpu -k "memory_comes_back or ncu" 2>&1 | tail -3
python3 -m tests.gpu.bench_all --runs 5 --tokens 96 --out "$OUT/bench.jsonl"
python3 -m tests.gpu.bench_all --kv fp8 --contexts 0 16000 --runs 5 --tokens 48 --out "$OUT/bench.jsonl"
python3 -m tests.gpu.time_sampling
python3 -m tests.gpu.extras
for model in mistral-7b:fp16 mistral-7b:fp8 llama-3.2-1b:fp8; do
    python3 -m calmnb verify-profile --shape "${model%:*}" --dtype "${model#*:}" --out "$OUT/verify-${model/:/-}.md" | tail -40
done
python3 -m tests.gpu.record_sessions --ncu --out "$OUT/sessions" | tail -1
python3 -m tests.gpu.placement mistral-7b fp16,fp8,gf4 0 4000 # one block on every multiprocessor
command -v nsys >/dev/null && python3 -m tests.gpu.record_nsys --out "$OUT/sessions" # docs/howto/nsys.md says which nsys and nvtx
python3 -m tests.gpu.sanitize --seconds 450 --out "$OUT/sanitize"
