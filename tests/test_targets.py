"""Every variant of every shipped kernel compiles with NVRTC for every target, with no GPU, and fits a budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jitkern import compilers, sources
from jitkern.errors import ToolchainError
from jitkern.kernel import cubin
from jitkern.ops import register_all
from jitkern.variants import Variant, registered
from tests.nvrtc import nvrtc_or_skip

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize("target", TARGETS)
def test_every_common_variant_compiles(target: str) -> None:
    nvrtc_or_skip()
    register_all()
    compiler = compilers.get("nvrtc")
    count = 0
    for kernel in registered().values():
        text = sources.shipped(kernel.name)
        assert not text.system_headers, "a shipped kernel needs no header of the system"
        for variant in kernel.variants(target, "nvrtc"):
            artifact = compiler.compile(variant, text)
            assert variant.symbol.encode() in artifact.binary
            assert not artifact.log.strip(), artifact.log  # no warning either
            count += 1
    assert count >= 12


@pytest.mark.parametrize("target", TARGETS)
def test_a_merge_of_known_length_spills_nothing(target: str) -> None:
    nvrtc_or_skip()
    for count in (2, 3, 4, 5, 8):
        for room in (1, count):
            constants = (("d", 128), *((("list", room),) if room > 1 else ()), ("count", count))
            variant = Variant("merge_states", "bf16", 8, target, constants)
            artifact = compilers.get("nvrtc").compile(variant, sources.shipped(variant.kernel))
            assert not artifact.log.strip(), artifact.log
            assert cubin.resources(artifact.binary, variant.symbol).local_bytes == 0, variant.name


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("pack", [1, 2, 4, 8])
def test_narrow_packs_compile(dtype: str, pack: int) -> None:
    nvrtc_or_skip()
    if dtype == "f32" and pack == 8:
        pytest.skip("8 floats are more than one access moves")
    variant = Variant("merge_attn_states", dtype, pack, "sm_75", (("d", 24),))
    assert compilers.get("nvrtc").compile(variant, sources.shipped(variant.kernel)).binary


@pytest.mark.parametrize("target", TARGETS[1:])
@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("pack", [8, 1])
def test_caches_of_codes_compile_and_keep_their_registers(target: str, cache: int, pack: int) -> None:
    nvrtc_or_skip()
    register_all()
    for plain in registered()["mla_decode"].variants(target, "nvrtc"):
        if plain.dtype != "bf16":
            continue
        variant = replace(plain, pack=pack, constants=(*plain.constants, ("cache", cache)))
        artifact = compilers.get("nvrtc").compile(variant, sources.shipped("mla_decode"))
        assert not artifact.log.strip(), artifact.log
        spilled = cubin.resources(artifact.binary, variant.symbol).local_bytes
        # A producer has no more registers than with a plain cache; byte by byte, which is slow anyhow, some are short.
        assert spilled <= (128 if target != "sm_90" else 16 if pack == 8 else 32)


def test_an_unknown_target_is_explained() -> None:
    nvrtc_or_skip()
    variant = Variant("merge_attn_states", "f32", 4, "sm_999", (("d", 64),))
    with pytest.raises(ToolchainError, match="cannot compile for sm_999; it knows sm_75"):
        compilers.get("nvrtc").compile(variant, sources.shipped(variant.kernel))


def test_the_text_compiles_as_a_plain_file() -> None:
    """Every hole has a default: `nvcc file.cu` and clangd take the text unchanged. Here: NVRTC with no -D at all."""
    nvrtc_or_skip()
    from jitkern.compilers import nvrtc

    for name in sources.names():
        log, binary = nvrtc._run(
            nvrtc._library(), sources.shipped(name).flat, f"{name}.cu", ["--gpu-architecture=sm_90"]
        )
        assert binary, log
