"""Engines: one protocol, several implementations (`reference`, `cpu`, `cuda`)."""

from __future__ import annotations

from calmnb.engine.base import STAGES, Engine, EngineInfo, Kernel, LayerWeights, Phase, Recorder, Stage, Weights

__all__ = ["STAGES", "Engine", "EngineInfo", "Kernel", "LayerWeights", "Phase", "Recorder", "Stage", "Weights"]
