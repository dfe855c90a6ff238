"""What can go wrong, as a tree.

::

    CalmnbError
    ├── FormatError        a file is not what it says it is (truncated, out of range, wrong dtype or shape)
    │   └── TensorError    ... one named tensor of it is missing, unused, or has the wrong dtype, shape or values
    ├── UnsupportedError   valid input that this version cannot run (architecture, rope scaling, layout)
    ├── ConfigError        an argument or a configuration value is out of its range
    ├── TemplateError      a chat template failed, ran too long or reached for what it may not touch
    ├── ContextError       the prompt, or the next token, does not fit in the context
    ├── BusyError          the model is already generating for someone else
    ├── DeviceError        the device asked for is not there, or lacks memory
    │   └── CompileError   a CUDA kernel did not compile; carries kernel, options, architecture and log
    └── DownloadError      a model could not be fetched, or arrived damaged

Every message says what was asked, what was found, what is accepted and what to do. Errors that a caller would
treat alike share a class; a user's mistake never surfaces as anything but a `CalmnbError`.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "CalmnbError",
    "CompileError",
    "ConfigError",
    "ContextError",
    "DeviceError",
    "DownloadError",
    "FormatError",
    "TemplateError",
    "TensorError",
    "UnsupportedError",
]


class CalmnbError(Exception):
    """Base of everything calmnb raises on purpose."""


class FormatError(CalmnbError):
    """A file is damaged or is not in the format its name promises."""


class TensorError(FormatError):
    """A named tensor is missing, unused, mis-shaped or holds values that cannot be weights."""


class UnsupportedError(CalmnbError):
    """The input is valid, but this version of calmnb cannot run it."""


class ConfigError(CalmnbError, ValueError):
    """An argument or configuration value is outside what is accepted."""


class TemplateError(CalmnbError):
    """A chat template raised, ran past its bounds, or reached outside its sandbox."""


class ContextError(CalmnbError):
    """The prompt or the next token does not fit in the context window."""


class BusyError(CalmnbError):
    """The model is generating already; one model serves one sequence at a time."""


class DeviceError(CalmnbError):
    """The requested device is missing or does not have the memory the model needs."""


class CompileError(DeviceError):
    """A CUDA kernel failed to compile."""


class DownloadError(CalmnbError):
    """A model could not be fetched, or what arrived does not match its checksum."""
