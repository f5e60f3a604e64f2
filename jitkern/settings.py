"""The only reader of ``JITKERN_*`` environment variables.

A setting is read at first use and then kept; :func:`override` replaces settings for a while (tests, notebooks). A value
that makes no sense raises :class:`~jitkern.errors.SettingError` naming the variable, and so does an unknown
``JITKERN_*`` variable that looks like a misspelt one.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from jitkern.errors import SettingError


@dataclass(frozen=True)
class Settings:
    """What can be set. The ``help`` of each field is what the documentation prints."""

    cache_dir: Path | None = field(
        default=None, metadata={"help": "where entries are written; default: the user's cache directory"}
    )
    cache_roots: tuple[Path, ...] = field(
        default=(), metadata={"help": "further read-only roots, searched before compiling, separated by ':'"}
    )
    cache_max: int = field(
        default=1 << 30,
        metadata={"help": "bytes (or 500M, 2G) the cache may take before the least recently used entries go"},
    )
    bundle_key: Path | None = field(
        default=None, metadata={"help": "a public key (Ed25519, PEM) that imported bundles must be signed with"}
    )
    mode: str = field(
        default="jit",
        metadata={"help": "jit: compile on a miss; hit-only: a miss raises", "one_of": ("jit", "hit-only")},
    )
    freeze: str = field(
        default="off",
        metadata={
            "help": "what a compile is where everything should be warm, as jitkern.freeze has it",
            "one_of": ("off", "event", "warning", "error"),
        },
    )
    backend: str = field(
        default="auto",
        metadata={"help": "the default of backend=", "one_of": ("auto", "nvrtc", "nvcc", "cpu")},
    )
    loader: str = field(
        default="driver",
        metadata={"help": "what loads a cubin: the driver itself, or CuPy's RawModule", "one_of": ("driver", "cupy")},
    )
    lock_timeout: float = field(
        default=60.0, metadata={"help": "seconds to wait for another process that compiles the same variant"}
    )
    log: str = field(
        default="warning",
        metadata={"help": "level of the logger 'jitkern'", "one_of": ("debug", "info", "warning", "error", "off")},
    )
    quiet: bool = field(default=False, metadata={"help": "no line about compiles that take longer than a second"})
    sources_dir: Path | None = field(default=None, metadata={"help": "kernel texts to use instead of the package's"})
    pdl: bool = field(
        default=True, metadata={"help": "launch kernels that wait for their predecessor before it has finished"}
    )
    threads: int = field(default=0, metadata={"help": "threads of a CPU kernel; 0: as many as torch uses"})
    validate: bool = field(
        default=False,
        metadata={"help": "also check, at every call, values on the device (a sync) and shared memory"},
    )


_PREFIX = "JITKERN_"
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MIB": 1 << 20, "G": 1 << 30, "GIB": 1 << 30}
_override: Settings | None = None
_cached: Settings | None = None


def _boolean(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("expected 0 or 1")
    return words[text.lower()]


def _size(text: str) -> int:
    digits = text.strip().rstrip("KMGiBkmgb ").strip()
    unit = text.strip()[len(digits) :].strip().upper()
    if unit not in _UNITS:
        raise ValueError("expected bytes, or a number with K, M or G")
    number = float(digits)
    if not 0 <= number < float("inf"):
        raise ValueError("expected a number of bytes that is not negative")
    return int(number * _UNITS[unit])


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("expected a number of seconds that is not negative")
    return number


def _path(text: str) -> Path:
    path = Path(text).expanduser()
    if "\0" in text:
        raise ValueError("expected a path")
    return path if path.is_absolute() else Path.cwd() / path


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("expected a whole number that is not negative")
    return number


_PARSERS: dict[str, Any] = {
    "cache_dir": _path,
    "cache_roots": _paths,
    "cache_max": _size,
    "bundle_key": _path,
    "lock_timeout": _seconds,
    "pdl": _boolean,
    "quiet": _boolean,
    "sources_dir": _path,
    "threads": _count,
    "validate": _boolean,
}


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Build settings from a mapping of environment variables.

    Raises:
        SettingError: a value makes no sense, or a variable's name is close to a known one but is none.
    """
    values: dict[str, Any] = {}
    known = {_PREFIX + item.name.upper(): item for item in fields(Settings)}
    for name, text in environment.items():
        if not name.startswith(_PREFIX):
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if close:
                raise SettingError(f"{name} is no setting of jitkern; did you mean {close[0]}?")
            continue
        item = known[name]
        if text == "":
            continue  # as if unset: shells and container files cannot always unset
        allowed = item.metadata.get("one_of")
        try:
            value = _PARSERS[item.name](text) if item.name in _PARSERS else text.lower()
        except ValueError as error:
            raise SettingError(f"{name}={text!r}: {error}. It is: {item.metadata['help']}.") from None
        if allowed and value not in allowed:
            raise SettingError(f"{name}={text!r}: allowed are {', '.join(allowed)}. It is: {item.metadata['help']}.")
        values[item.name] = value
    return Settings(**values)


def get() -> Settings:
    """The settings in force."""
    global _cached
    if _override is not None:
        return _override
    if _cached is None:
        _cached = from_environment(os.environ)
    return _cached


def reload() -> Settings:
    """Read the environment again, for a program that changes ``os.environ`` after the first use."""
    global _cached
    _cached = None
    return get()


@contextlib.contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Use other settings inside a ``with`` block. Process-wide: not for concurrent threads with different wishes."""
    global _override
    before = _override
    _override = replace(get(), **changes)
    try:
        yield _override
    finally:
        _override = before


def table() -> list[tuple[str, str, str]]:
    """(variable, default, meaning) of every setting, for documentation and ``jitkern doctor``."""
    return [
        (_PREFIX + f.name.upper(), str(f.default if f.default not in (None, ()) else "-"), _meaning(f.metadata))
        for f in fields(Settings)
    ]


def _meaning(metadata: Mapping[str, Any]) -> str:
    text, values = str(metadata["help"]), metadata.get("one_of", ())
    return text if all(value in text for value in values) else f"{text} ({', '.join(values)})"
