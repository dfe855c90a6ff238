"""compute-sanitizer over the kernel tests: ``python -m tests.gpu.sanitize [--tools ...] [--seconds S] [--out FOLDER]``.

Every test that launches a kernel runs under each tool, a few tests a process, as many processes as there are cores, with
fewer layers and positions (`tests.gpu.short`). Left out (`LEFT_OUT`) are tests of time, of free memory, of profilers that
want the driver's hooks to themselves, and of a thousand tokens of thirty layers, whose kernels other tests have too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# A call that fails is no error of a kernel: cuGetProcAddress is asked for what a driver may lack.
TOOLS = {"racecheck": ["--racecheck-report", "all"], "memcheck": ["--report-api-errors", "no"], "synccheck": []}
# Slowest first, so that no core is left with them at the end; tests of one line go a chunk together.
FILES = {"test_sampling": 1, "test_engine": 4, "test_transformers": 4, "test_matvec": 15, "test_one_kernel": 15}
LONG = "every_length_of_a_context"
LEFT_OUT = re.compile("each_idea_helps|memory_comes_back|does_not_fit|same_bits_with_and_without")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]


@dataclass(frozen=True)
class Chunk:
    """Some tests that run in one process under one tool."""

    tool: str
    tests: tuple[str, ...]
    name: str


@dataclass(frozen=True)
class Outcome:
    """What a chunk's process said: how its tests ended, and the tool's own summary ("" if it was cut off)."""

    chunk: Chunk
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    summary: str = ""
    died: bool = False
    seconds: float = 0.0

    @property
    def left(self) -> int:
        """Tests that did not get to run to their end."""
        return len(self.chunk.tests) - self.passed - self.failed - self.skipped

    @property
    def clean(self) -> bool:
        """Whether the tool finished and found nothing."""
        return bool(self.summary) and not any(int(n) for n in re.findall(r"\d+", self.summary))


def collect(only: str | None) -> list[str]:
    """Node ids of the kernel tests, in the order of `FILES`."""
    files = [f"tests/gpu/{name}.py" for name in FILES]
    listed = subprocess.run(
        [*PYTEST, "--collect-only", *files, *(["-k", only] if only else [])], capture_output=True, text=True, check=False
    )
    tests = [line for line in listed.stdout.splitlines() if "::" in line and not LEFT_OUT.search(line)]
    if not tests:
        sys.exit(f"no test was collected:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    return sorted(tests, key=lambda test: (LONG in test, list(FILES).index(Path(test.split("::")[0]).stem)))


def split(tests: list[str], tools: list[str]) -> list[Chunk]:
    """Chunks of tests, tools taking turns."""
    groups: list[list[str]] = []
    for test in tests:
        file = Path(test.split("::")[0]).stem
        most = 1 if LONG in test else FILES[file]
        if groups and len(groups[-1]) < most and groups[-1][0].split("::")[0] == test.split("::")[0]:
            groups[-1].append(test)
        else:
            groups.append([test])
    return [Chunk(tool, tuple(group), f"{tool}-{i:03d}") for i, group in enumerate(groups) for tool in tools]


def check(chunk: Chunk, end: float, out: Path) -> Outcome:
    """Run `chunk`; at `end` (of `time.monotonic`) its process stops after the test it is in."""
    began = time.monotonic()
    if end - began < 5:
        return Outcome(chunk)
    log = out / f"{chunk.name}.log"
    command = ["timeout", "-s", "KILL", f"{end - began + 60:.0f}"]  # takes the processes with it that the tool started
    command += ["compute-sanitizer", "--tool", chunk.tool, *TOOLS[chunk.tool]]
    command += [*PYTEST, f"--session-timeout={end - began:.0f}", *chunk.tests]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "CALMNB_TEST_SHORT": "1"}
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    text = log.read_text(errors="replace")
    ended = re.findall(r"^(\d+ .*) in [\d.]+s", text, re.MULTILINE)
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", ended[-1] if ended else "")}
    summary = re.findall(r"SUMMARY: (.*)", text)
    return Outcome(
        chunk,
        passed=counted.get("passed", 0),
        failed=counted.get("failed", 0) + counted.get("error", 0),
        skipped=counted.get("skipped", 0),
        summary=summary[-1] if summary else "",
        died="didn't terminate successfully" in text or not (summary or time.monotonic() > end),
        seconds=time.monotonic() - began,
    )


def run(chunks: list[Chunk], jobs: int, end: float, out: Path) -> list[Outcome]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda chunk: check(chunk, end, out), chunks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", default=["racecheck", "memcheck"], choices=list(TOOLS))
    parser.add_argument("--seconds", type=float, default=400, help="start no test after so long (default: 400)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("-k", dest="only", help="only tests whose names match, as pytest's -k")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")) / "sanitize")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds
    tests = collect(arguments.only)
    outcomes = run(split(tests, arguments.tools), arguments.jobs, end, arguments.out)
    # A process can die of what the others take (memory, most of all): those get a second turn in smaller company.
    died = [o.chunk for o in outcomes if o.died]
    if died:
        print(f"{len(died)} processes died and run again: {' '.join(chunk.name for chunk in died)}")
        outcomes = [o for o in outcomes if not o.died] + run(died, max(1, arguments.jobs // 4), end, arguments.out)
    bad = [o for o in outcomes if o.failed or (o.summary and not o.clean) or (o.passed and not o.summary)]
    for outcome in bad:
        print(f"{outcome.chunk.name}: {outcome.summary or 'cut off'}, {outcome.failed} failed: {' '.join(outcome.chunk.tests)}")
    for outcome in sorted(outcomes, key=lambda o: -o.seconds)[:8]:
        print(f"  slowest: {outcome.seconds:4.0f} s {outcome.chunk.tool} {outcome.chunk.tests[0]}")
    for tool in arguments.tools:
        mine = [o for o in outcomes if o.chunk.tool == tool]
        whole = [o for o in mine if o.summary]
        print(
            f"{tool}: {sum(o.passed for o in whole)} of {len(tests)} tests passed, {sum(o.failed for o in mine)} failed, "
            f"{sum(o.skipped for o in mine)} skipped; {sum(not o.clean for o in whole)} of {len(whole)} processes found "
            f"anything ({sum(o.seconds for o in mine):.0f} s of processes)"
        )
        for outcome in mine:
            if outcome.left:
                print(f"  {outcome.left} tests did not end in {outcome.chunk.name}: {' '.join(outcome.chunk.tests)}")
    sys.exit(bool(bad) or any(o.left for o in outcomes))


if __name__ == "__main__":
    main()
