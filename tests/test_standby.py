"""A cache filled elsewhere serves a machine that has no compiler, for CPU and GPU variants alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jitkern import binaries, settings, sources, toolchain
from jitkern.errors import MissError, ToolchainError
from jitkern.variants import Variant

CPU = Variant("merge_attn_states", "f32", 4, "cpu", (("d", 64),), "cpu")
GPU = Variant("merge_attn_states", "f32", 4, "sm_90", (("d", 64),))


def missing(*_: object) -> None:
    raise ToolchainError("it is not installed")


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    with settings.override(cache_dir=root):
        yield root
    binaries.forget()


@pytest.mark.parametrize("mode", ["jit", "hit-only"])
@pytest.mark.parametrize("variant", [CPU, GPU], ids=["cpu", "sm_90"])
def test_an_entry_is_found_without_its_compiler(
    variant: Variant, mode: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, how = binaries.obtain(variant)
    assert how == "compiled"
    binaries.forget()
    for name in ("nvrtc", "host_compiler", "nvcc"):
        monkeypatch.setattr(toolchain, name, missing)
    with settings.override(mode=mode):
        assert binaries.obtain(variant) == (made, "cached")


@pytest.mark.parametrize("variant", [CPU, GPU], ids=["cpu", "sm_90"])
def test_a_miss_without_a_compiler_is_a_miss_where_only_hits_are_allowed(
    variant: Variant, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvrtc", "host_compiler", "nvcc"):
        monkeypatch.setattr(toolchain, name, missing)
    with settings.override(mode="hit-only"), pytest.raises(MissError) as caught:
        binaries.obtain(variant)
    assert str(variant.warm_line()) in str(caught.value)
    with pytest.raises(ToolchainError, match="it is not installed"):
        binaries.obtain(variant)


def test_another_text_or_a_damaged_entry_is_not_taken(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries.obtain(CPU)
    binaries.forget()
    monkeypatch.setattr(toolchain, "host_compiler", missing)
    shipped = sources.shipped(CPU.kernel)
    edited = sources.flatten(CPU.kernel, shipped.flat + "\n// edited\n", "kernels_src/merge_attn_states.cu")
    with pytest.raises(ToolchainError, match=r"is not cached .* cannot be compiled here: it is not installed"):
        binaries.obtain(CPU, edited)
    (binary,) = own_cache.rglob("kernel.so")
    binary.write_bytes(binary.read_bytes()[:-1] + b"x")
    with pytest.raises(ToolchainError, match="is not cached"):
        binaries.obtain(CPU)


def test_another_machine_is_not_served(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binaries.obtain(CPU)
    binaries.forget()
    abi = dict(toolchain.host_abi())
    monkeypatch.setattr(toolchain, "host_abi", lambda: abi | {"instructions": "fewer"})
    monkeypatch.setattr(toolchain, "host_compiler", missing)
    with pytest.raises(ToolchainError):
        binaries.obtain(CPU)
