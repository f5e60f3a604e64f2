"""What a token of the latent cache may be made of: plain elements, 8-bit codes with one scale, or 656 packed bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.ops import checks

PACKED = "fp8_ds_mla"
PACKED_BYTES = 656


@dataclass(frozen=True)
class Format:
    """How keys lie in the cache.

    Attributes:
        number: ``JITKERN_CACHE`` of kernels_src/include/mla_cache.cuh.
        dtypes: of the cache's tensor, by name.
        width: elements of a token.
    """

    number: int
    dtypes: tuple[str, ...]
    width: int

    @property
    def scaled(self) -> bool:
        """Whether one scale for all keys can be given."""
        return self.number == 1

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        """What it adds to a variant of the decode."""
        return (("cache", self.number),) if self.number else ()


def of(op: str, cache_dtype: Any, dtype: Any, head_dim: int) -> Format:
    """The format that ``cache_dtype`` of :class:`~jitkern.ops.mla.MLADecode` means.

    Raises:
        UnsupportedError: there is no such cache, or not for this head size and dtype.
    """
    import torch

    if cache_dtype is None or cache_dtype == dtype:
        return Format(0, (str(dtype).removeprefix("torch."),), head_dim)
    if cache_dtype == torch.float8_e4m3fn:
        return Format(1, ("float8_e4m3fn",), head_dim)
    if cache_dtype != PACKED:
        raise UnsupportedError(
            f"{op}: cache_dtype={cache_dtype!r}; expected None or {dtype} (plain), torch.float8_e4m3fn (codes with one"
            f" scale) or {PACKED!r} (tokens of {PACKED_BYTES} bytes)"
        )
    if head_dim != 576 or dtype != torch.bfloat16:
        raise UnsupportedError(
            f"{op}: cache_dtype={PACKED!r} with head_dim={head_dim}, dtype={dtype}; such a token is 512 codes and 64"
            " bfloat16, so head_dim=576 and dtype=torch.bfloat16"
        )
    return Format(2, ("uint8", "float8_e4m3fn"), PACKED_BYTES)


def scales(op: str, made_for: Any, k_scale: Any, q_scale: Any) -> None:
    """Check the scales of a run.

    Raises:
        ArgumentError: one is not a float32 tensor of one element on the object's device, or the cache has none.
        UnsupportedError: one has a derivative that would be lost, or is wrapped by a transform.
    """
    import torch

    for name, value in (("k_scale", k_scale), ("q_scale", q_scale)):
        if value is None:
            continue
        if not made_for.cache_format.scaled:
            raise ArgumentError(
                f"{op}: {name} is given, but this object was made for cache_dtype={made_for.cache_dtype!r}, which has"
                " no scale beside the cache; make it with cache_dtype=torch.float8_e4m3fn"
            )
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{op}: {name} is a {type(value).__name__}; expected a float32 tensor of one element on"
                f" {made_for.device}, so that a graph reads it anew at each replay"
            )
        checks.tensor(op, name, value, value.dim(), "of one element")
        checks.dtype(op, name, value, torch.float32)
        if value.device != made_for.device or value.numel() != 1:
            raise ArgumentError(
                f"{op}: {name} has shape {list(value.shape)} on {value.device}; expected one element on"
                f" {made_for.device}"
            )
    checks.memory(op, k_scale=k_scale, q_scale=q_scale)  # without any it would pass for none
    checks.no_gradient(op, k_scale=k_scale, q_scale=q_scale)
