"""Compiled kernels, step programs and their graphs, each made once and when first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from calmnb.engine.cuda_device import Gpu
from calmnb.engine.cuda_program import Ending, Plans, StepProgram, build_program
from calmnb.engine.cuda_stamps import StampLevel, StampRing
from calmnb.kernels import CompiledKernel, KernelSpec, compile_all

__all__ = ["KernelSet", "StepGraphs", "step_specs"]


class KernelSet:
    """Kernels of one architecture, compiled at first use."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._compiled: dict[KernelSpec, CompiledKernel] = {}

    def __call__(self, spec: KernelSpec) -> CompiledKernel:
        """Return the compiled kernel."""
        if spec not in self._compiled:
            self.add([spec])
        return self._compiled[spec]

    def add(self, specs: Iterable[KernelSpec]) -> None:
        """Compile several, a few at a time."""
        self._compiled.update(compile_all([s for s in specs if s not in self._compiled], self._arch))


def step_specs(plans: Plans) -> list[KernelSpec]:
    """List what every step of a model needs."""
    wanted: dict[KernelSpec, None] = {}

    def note(spec: KernelSpec) -> Any:
        wanted[spec] = None

    nowhere = _Nowhere()
    endings: tuple[Ending, ...] = ("logits", "draw")
    for ending in endings:
        for short in (False, True):
            build_program(plans, note, nowhere, nowhere, 0, ending, short=short)
    return list(wanted)


class _Nowhere(dict[str, int]):
    """Addresses for a program that is only listed, never run."""

    def __missing__(self, key: str) -> int:
        return 0

    def get(self, key: str, default: int | None = None) -> int:  # type: ignore[override]
        return 0


class StepGraphs:
    """The graphs of one engine.

    Parameters
    ----------
    gpu, plans, kernels
        Device, geometry and compiled kernels.
    weights, work, cache, host_ring
        Where everything lies; see `build_program`.

    Attributes
    ----------
    stamps : StampRing or None
        Where stamped steps leave their times; made with the first of them.
    overlap : bool
        Whether a kernel may start before the one ahead of it has ended, where the GPU can do that. Off, stamps give every
        kernel's time alone, as outside tools see it.
    """

    def __init__(
        self,
        gpu: Gpu,
        plans: Plans,
        kernels: KernelSet,
        weights: Mapping[str, int],
        work: Mapping[str, int],
        cache: int,
        host_ring: int,
    ) -> None:
        self._gpu = gpu
        self._plans = plans
        self._kernels = kernels
        self._weights, self._work, self._cache, self._host_ring = weights, work, cache, host_ring
        self._programs: dict[tuple[Ending, int, bool], StepProgram] = {}
        self._graphs: dict[tuple[Ending, int, bool, bool], Callable[[], None]] = {}
        self.stamps: StampRing | None = None
        self.overlap = True

    def program(self, ending: Ending, *, level: int = 0, short: bool = False) -> StepProgram:
        """List the launches of a step that ends in `ending`; `level` is that of its stamps, 0 for none."""
        key = (ending, level, short)
        if key not in self._programs:
            if level and self.stamps is None:
                self.stamps = StampRing(self._gpu, n_kernels=8 * self._plans.config.n_layers + 16)
            places = {**self.stamps.places(), "stamp_level": level} if level and self.stamps is not None else {}

            def build(kernels: Callable[[KernelSpec], Any]) -> StepProgram:
                return build_program(
                    self._plans,
                    kernels,
                    self._weights,
                    self._work,
                    self._cache,
                    ending,
                    short=short,
                    host_ring=self._host_ring,
                    **places,
                )

            wanted: dict[KernelSpec, Any] = {}
            build(lambda spec: wanted.setdefault(spec, None))  # listed first, so that they compile side by side
            self._kernels.add(wanted)
            self._programs[key] = build(self._kernels)
        return self._programs[key]

    def at(self, ending: Ending, pos: int) -> StepProgram:
        """The launches of the step at `pos`, without stamps."""
        return self.program(ending, short=self._plans.is_short(pos))

    def prepare(self, ending: Ending, level: int, pos: int) -> Callable[[], None]:
        """Return what queues the step at `pos`, capturing its graph if there is none yet."""
        key = (ending, level, self._plans.is_short(pos), self.overlap)
        if key not in self._graphs:
            program = self.program(ending, level=level, short=key[2])
            launches = program.launches if self.overlap and self._gpu.has_pdl else [one.alone() for one in program.launches]
            graph = self._gpu.capture(launches)
            self._graphs[key] = self._noted(graph, program, level) if level else graph
        return self._graphs[key]

    def run(self, ending: Ending, level: int, pos: int) -> None:
        """Queue the step at `pos`."""
        self.prepare(ending, level, pos)()

    def forget(self) -> None:
        """Capture every graph anew at its next use."""
        self._graphs.clear()

    def _noted(self, graph: Callable[[], None], program: StepProgram, level: int) -> Callable[[], None]:
        stamps = self.stamps
        assert stamps is not None

        def run() -> None:
            graph()
            stamps.begin(program.kernels, StampLevel(level))  # a launch that failed leaves no times to wait for

        return run
