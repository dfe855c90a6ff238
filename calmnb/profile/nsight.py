"""Running programs under NVIDIA's profilers: finding ``nsys`` and ``ncu``, the options that suit calmnb, and what goes wrong.

Both must be there when the program starts, for they get between it and the CUDA driver; neither can be switched on in a
process that has used the GPU already. That is why everything here starts a new process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calmnb.errors import CalmnbError, ConfigError, FormatError

if TYPE_CHECKING:
    from calmnb.profile.session import Session

__all__ = ["NCU_METRICS", "export_sqlite", "find_tool", "nsys_script", "run_ncu", "run_nsys"]

#: What `calmnb.profile.ncu` reads.
NCU_METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")

_PRODUCTS = {"nsys": ("Nsight Systems", "nsight-systems"), "ncu": ("Nsight Compute", "nsight-compute")}
_PLACES = {
    "nsys": ("/usr/local/cuda/bin", "/opt/nvidia/nsight-systems*/*/bin"),
    "ncu": ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute*/*"),
}

#: What nsys prints while it makes its report: a bar that grows, hundreds of times.
_PROGRESS = re.compile(r"\[\s*=*\s*\d+%\s*\]")
#: What it says where its report lacks something, without failing.
_INCOMPLETE = "Errors occurred while processing the raw events"

Output = Callable[[str], object]


def find_tool(name: str) -> str:
    """Path of ``nsys`` or ``ncu``: on the PATH, or where NVIDIA's installers put it.

    Raises
    ------
    CalmnbError
        If it is not there; says how to get it.
    """
    found = shutil.which(name)
    if found:
        return found
    for place in _PLACES[name]:
        folder = Path(place)
        for candidate in sorted(Path("/").glob(str(folder.relative_to("/"))), reverse=True):
            found = shutil.which(name, path=str(candidate))
            if found:
                return found
    product, page = _PRODUCTS[name]
    raise CalmnbError(
        f"{name} is not on the PATH: it is part of NVIDIA {product}, which comes with the CUDA toolkit, "
        f"or alone from https://developer.nvidia.com/{page}; install it and try again"
    )


def run_nsys(
    command: Sequence[str],
    report: Path,
    *,
    capture_range: bool = False,
    env: Mapping[str, str] | None = None,
    output: Output = print,
) -> Path:
    """Run `command` under Nsight Systems and export what it saw.

    Parameters
    ----------
    command
        Program and arguments.
    report
        Where to leave the report; ``.nsys-rep`` is appended if it is not there. The export stands beside it.
    capture_range
        Record only between ``cudaProfilerStart`` and ``cudaProfilerStop`` of the program.
    env
        Environment of the program; this process's when left out.
    output
        Receives each line that program and tool print.

    Returns
    -------
    Path
        The SQLite file.

    Raises
    ------
    CalmnbError
        If ``nsys`` is missing, the program fails, or no report appears.
    """
    tool = find_tool("nsys")
    report = report if report.suffix == ".nsys-rep" else report.with_name(report.name + ".nsys-rep")
    options = [
        "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node",
        "--force-overwrite=true", f"--output={report.with_suffix('')}",
    ]  # fmt: skip
    if capture_range:
        options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    before = report.stat().st_mtime_ns if report.is_file() else None
    incomplete = False

    def pass_on(line: str) -> None:
        nonlocal incomplete
        incomplete = incomplete or _INCOMPLETE in line
        if not _PROGRESS.search(line):
            output(line)

    status = _run([tool, *options, *_resolved(command)], env, pass_on)
    if status:
        raise CalmnbError(f"{' '.join(command)} ended with status {status} under nsys; see what it printed above")
    if not report.is_file() or report.stat().st_mtime_ns == before:
        why = "; the program never called cudaProfilerStart: leave --capture-range out" if capture_range else ""
        raise CalmnbError(f"nsys wrote no report to {report}{why}; see what it printed above")
    if incomplete:
        output(
            "warning: nsys did not understand all that it recorded (see above), so kernels may be missing from what follows; "
            "it is probably older than the CUDA libraries of the program: install a newer Nsight Systems"
        )
    return export_sqlite(report, report.with_suffix(".sqlite"))


def nsys_script(code: str, *, report: str | Path | None = None, capture_range: bool = False, output: Output = print) -> Session:
    """Run Python code in a process of its own under Nsight Systems and return what it saw.

    Parameters
    ----------
    code
        A script; modules beside the present folder can be imported.
    report, capture_range, output
        As for `run_nsys`; without `report`, nothing is kept.

    Raises
    ------
    CalmnbError
        As `run_nsys`.
    FormatError
        As `calmnb.profile.nsys.read_nsys`.
    """
    from calmnb.profile.nsys import read_nsys

    path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="calmnb-nsys-") as folder:
        script = Path(folder) / "cell.py"
        script.write_text(code, encoding="utf-8")
        kept = Path(folder) / "report" if report is None else Path(report).expanduser()
        env = {**os.environ, "PYTHONPATH": path}
        exported = run_nsys([sys.executable, "-u", str(script)], kept, capture_range=capture_range, env=env, output=output)
        return read_nsys(exported)


def export_sqlite(report: Path, out: Path) -> Path:
    """Export a ``.nsys-rep`` to SQLite and return `out`.

    Raises
    ------
    CalmnbError
        If ``nsys`` is missing.
    FormatError
        If it cannot read the report.
    """
    try:
        tool = find_tool("nsys")
    except CalmnbError as error:
        raise CalmnbError(
            f"{report} must be exported to SQLite first, and {error}. Or export it where nsys is: "
            f"nsys export --type sqlite -o {out.name} {report.name}"
        ) from error
    command = [tool, "export", "--type=sqlite", "--force-overwrite=true", f"--output={out}", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not out.is_file():
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise FormatError(f"{report}: nsys cannot export it (status {done.returncode}; it says: {said})")
    return out


def run_ncu(
    command: Sequence[str],
    *,
    skip: int = 0,
    count: int | None = None,
    kernels: str | None = None,
    in_range: bool = False,
    env: Mapping[str, str] | None = None,
    output: Output = print,
) -> str:
    """Run `command` under Nsight Compute and return its CSV, one row a kernel and metric.

    Parameters
    ----------
    command
        Program and arguments.
    skip, count
        Kernels to pass over, and to measure; each measured kernel runs several times, so this is slow.
    kernels
        Regular expression that names must contain.
    in_range
        Measure only between ``cudaProfilerStart`` and ``cudaProfilerStop`` of the program.
    env, output
        As for `run_nsys`.

    Raises
    ------
    CalmnbError
        If ``ncu`` is missing, may not read the counters, or the program fails.
    """
    tool = find_tool("ncu")
    with tempfile.TemporaryDirectory(prefix="calmnb-ncu-") as folder:
        log = Path(folder) / "ncu.csv"
        options = [
            "--csv", "--print-units", "base", "--graph-profiling", "node", "--target-processes", "all",
            "--clock-control", "none", "--metrics", ",".join(NCU_METRICS), "--log-file", str(log),
        ]  # fmt: skip
        if in_range:
            options += ["--profile-from-start", "off"]
        if skip:
            options += ["--launch-skip", str(skip)]
        if count is not None:
            options += ["--launch-count", str(count)]
        if kernels:
            options += ["--kernel-name", f"regex:{kernels}"]
        status = _run([tool, *options, *_resolved(command)], env, output)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if "ERR_NVGPUCTRPERM" in text:
        raise CalmnbError(
            "ncu may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or have the administrator allow it: "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    if status:
        said = re.findall(r"^==ERROR==\s*(.+)$", text, re.MULTILINE)
        raise CalmnbError(f"{' '.join(command)} ended with status {status} under ncu" + (f": {said[0]}" if said else ""))
    return text


def _resolved(command: Sequence[str]) -> list[str]:
    """The command with ``calmnb`` and ``python`` meaning those of this environment."""
    if not command:
        raise ConfigError("there is no command to run; write it after the options, as in: calmnb nsys -- calmnb bench")
    program, *rest = command
    if program == "calmnb":
        return [sys.executable, "-m", "calmnb", *rest]
    if program == "python":
        return [sys.executable, *rest]
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not a program on the PATH; name one that is, or its path")
    return [program, *rest]


def _run(command: Sequence[str], env: Mapping[str, str] | None, output: Output) -> int:
    """Run, hand on each line that is printed, and return the exit status; an interrupt ends the program too."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(os.environ if env is None else env),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output(line.rstrip("\n"))
        except BaseException:
            process.terminate()
            raise
        return process.wait()
