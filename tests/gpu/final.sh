# One pass over everything that needs the GPU, most important first; results as they come.
export CALMNB_CACHE=${CALMNB_CACHE:-/tmp/calmnb-cache} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
py="python3 -m pytest -q -p no:cacheprovider -o filterwarnings=default --tb=line"
timeout 60 $py -n 8 tests/gpu/test_engine.py -k "not memory" >"$OUT/engine.log" 2>&1; grep -v -i warn "$OUT/engine.log" | tail -12 | cut -c1-160
timeout 70 python3 -m tests.gpu.bench_all --runs 5 --tokens 96 --out "$OUT/bench.jsonl" 2>&1 | tail -22
timeout 30 python3 -m tests.gpu.check_cut .dev 2>&1 | tail -2
timeout 20 $py tests/gpu/test_engine.py -k memory 2>&1 | tail -1
timeout 25 python3 -m tests.gpu.profile_step mistral-7b fp8 0 300 4000 | cut -c1-250
timeout 25 python3 -m tests.gpu.profile_step llama-3.2-1b fp8,gf4 0 4000 | cut -c1-250
timeout 45 python3 -m tests.gpu.bench_all --kv fp8 --contexts 0 16000 --runs 3 --tokens 48 --out "$OUT/bench.jsonl" 2>&1 | tail -20
timeout 40 compute-sanitizer --tool memcheck python3 -m pytest -q -p no:cacheprovider -o filterwarnings=default tests/gpu/test_engine.py -k "vectors or plain or gf4-fp8-kv or splits" 2>&1 | tail -3
timeout 40 compute-sanitizer --tool racecheck python3 -m pytest -q -p no:cacheprovider -o filterwarnings=default tests/gpu/test_engine.py -k "vectors and A" 2>&1 | tail -3
