"""Every error that jitkern raises. Each message says what was asked, what is allowed and what to do next."""

from __future__ import annotations


class JitkernError(Exception):
    """Base class of all errors raised by jitkern."""


class SettingError(JitkernError, ValueError):
    """A ``JITKERN_*`` environment variable holds a value that it cannot have."""


class ArgumentError(JitkernError, ValueError):
    """An operand of an op has a shape, dtype, device, stride or value that the op cannot take."""


class UnsupportedError(JitkernError, NotImplementedError):
    """The request is meaningful, but no kernel serves it on this backend."""


class ToolchainError(JitkernError, RuntimeError):
    """A compiler, a library or a header that is needed is missing or does not fit the others."""


class CompileError(JitkernError, RuntimeError):
    """The compiler rejected a kernel text.

    Attributes:
        log: the compiler's whole output.
        source: the flattened text that was compiled.
    """

    def __init__(self, message: str, *, log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.source = source


class LaunchError(JitkernError, RuntimeError):
    """The driver refused to load or to launch a kernel."""


class CaptureError(JitkernError, RuntimeError):
    """A kernel that is not ready was called while a CUDA graph was being captured.

    It is raised before anything of CUDA is touched, so the capture stays valid.
    """


class MissError(JitkernError, RuntimeError):
    """``JITKERN_MODE=hit-only`` and the variant is in no cache."""


class CacheError(JitkernError, RuntimeError):
    """A cache operation that was asked for by name (list, clear, export ...) could not be done.

    Failures on the way of a launch never raise this: jitkern then goes on in memory and warns once.
    """
