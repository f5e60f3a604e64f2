"""Whose binary it is: other nodes, other compilers, other headers, edited texts, and what makes no difference."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from jitkern import binaries, cache, compilers, loader, settings, sources, toolchain
from jitkern.compilers.extension import Extension
from jitkern.compilers.nvrtc import Nvrtc
from jitkern.variants import Variant
from tests.faults import injected
from tests.faults.conftest import the_store

GPU = Variant("merge_attn_states", "bf16", 8, "sm_90", (("d", 64),))
CPU = Variant("merge_attn_states", "f32", 4, "cpu", (("d", 64),), "cpu")


def digest(variant: Variant, text: sources.Text | None = None) -> str:
    return compilers.key_of(variant, text or sources.shipped(variant.kernel)).digest


@pytest.fixture
def texts(tmp_path):
    """A copy of the kernel texts that is in use."""
    folder = tmp_path / "texts"
    shutil.copytree(sources.root(), folder)
    with settings.override(sources_dir=folder):
        sources.forget()
        yield folder
    sources.forget()


def test_the_target_is_in_the_key_by_itself(monkeypatch):
    monkeypatch.setattr(Nvrtc, "options", lambda self, variant: [])
    assert digest(GPU) != digest(Variant(GPU.kernel, GPU.dtype, GPU.pack, "sm_80", GPU.constants))


def test_an_edited_header_is_a_miss_and_a_touched_one_a_hit(here, texts):
    assert loader.obtain(GPU)[1] == "compiled"
    header = texts / "include" / "pack.cuh"
    os.utime(header, (1e9, 1e9))
    sources.forget()
    assert loader.obtain(GPU)[1] == "cached"
    before = header.read_text()
    header.write_text(before + "\n// edited\n")
    sources.forget()
    assert loader.obtain(GPU)[1] == "compiled"
    header.write_text(before)
    sources.forget()
    assert loader.obtain(GPU)[1] == "cached"


def test_texts_in_another_folder_are_the_same_texts(here, texts, tmp_path):
    first = digest(GPU)
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(texts, moved)
    with settings.override(sources_dir=moved):
        assert digest(GPU) == first


@pytest.mark.parametrize("variant", [GPU, CPU], ids=["nvrtc", "cpu"])
def test_the_order_of_options_is_no_matter_and_their_content_is(variant, monkeypatch):
    first = digest(variant)
    kind = Nvrtc if variant is GPU else Extension
    options = kind.options
    monkeypatch.setattr(kind, "options", lambda self, v: options(self, v)[::-1])
    assert digest(variant) == first
    monkeypatch.setattr(kind, "options", lambda self, v: [*options(self, v), "-DMORE=1"])
    assert digest(variant) != first


def test_a_moved_environment_is_a_hit(here, tmp_path, monkeypatch):
    library = toolchain.nvrtc()
    moved = tmp_path / "moved" / "lib"
    moved.mkdir(parents=True)
    for path in library.path.parent.glob("libnvrtc*"):
        try:
            os.link(path, moved / path.name)
        except OSError:
            shutil.copy(path, moved / path.name)
    loader.obtain(GPU)
    elsewhere = toolchain._describe_nvrtc(moved / library.path.name, library.major)
    assert elsewhere.path != library.path
    monkeypatch.setattr(toolchain, "nvrtc", lambda: elsewhere)
    assert loader.obtain(GPU)[1] == "cached"


def test_another_build_of_the_same_version_is_a_miss(monkeypatch):
    from dataclasses import replace

    first, library = digest(GPU), toolchain.nvrtc()
    for change in ({"version": "99.9"}, {"build": "0" * 32}):
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, "nvrtc", lambda c=change: replace(library, **c))
            assert digest(GPU) != first


def test_other_headers_are_a_miss(monkeypatch, tmp_path):
    text = sources.flatten("probe", "#include <cuda_fp16.h>\n", "probe.cu")
    assert text.system_headers == ("cuda_fp16.h",)
    folders = []
    for version, more, cccl in ((13000, "", "1"), (13010, "", "1"), (13000, "// edited", "1"), (13000, "", "2")):
        folder = tmp_path / f"{version}{len(more)}{cccl}"
        folder.mkdir()
        (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
        (folder / "cuda_fp16.h").write_text(more)
        (folder / "cuda/std/__cccl").mkdir(parents=True)
        (folder / "cuda/std/__cccl/version.h").write_text(cccl)
        folders.append(folder)
    found = set()
    for folder in folders:
        monkeypatch.setattr(toolchain, "cuda_include", lambda f=folder: f)
        monkeypatch.setattr(toolchain, "cccl_include", lambda: None)
        toolchain.headers_identity.cache_clear()
        found.add(digest(GPU, text))
    toolchain.headers_identity.cache_clear()
    assert len(found) == 4


def compiler_script(path: Path, version: str) -> None:
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo {version}; exit; fi\nexec c++ "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def own_compiler(tmp_path, monkeypatch):
    path = tmp_path / "my-c++"
    compiler_script(path, "mine 1.0")
    monkeypatch.setenv("CXX", str(path))
    toolchain.forget()
    yield path
    monkeypatch.undo()
    toolchain.forget()


def test_an_upgraded_host_compiler_is_a_miss(here, own_compiler):
    assert loader.obtain(CPU)[1] == "compiled"
    assert loader.obtain(CPU)[1] == "cached"
    compiler_script(own_compiler, "mine 2.0")
    toolchain.forget()
    assert loader.obtain(CPU)[1] == "compiled"
    assert len(list(the_store().entries())) == 2


def test_a_compiler_replaced_while_the_process_runs_does_not_publish_under_the_old_name(here, own_compiler):
    old = digest(CPU)
    compiler_script(own_compiler, "mine 2.0")  # nobody tells the process
    assert loader.obtain(CPU)[1] == "compiled"
    assert list(the_store().entries()) == []
    assert loader.obtain(CPU)[1] == "compiled"  # by now it knows
    assert digest(CPU) != old
    assert loader.obtain(CPU)[1] == "cached"


@pytest.mark.parametrize("what", ["target", "version", "instructions"])
def test_two_nodes_on_one_cache_keep_apart(here, monkeypatch, what):
    if what == "instructions":
        abi = toolchain.host_abi()
        loader.obtain(CPU)
        monkeypatch.setattr(toolchain, "host_abi", lambda: abi | {"instructions": "another CPU"})
        assert loader.obtain(CPU)[1] == "compiled"
        return
    nodes = [injected.Compiler(version="1"), injected.Compiler(version="2" if what == "version" else "1")]
    variants = [injected.variant(1, "sm_80"), injected.variant(1, "sm_80" if what == "version" else "sm_90")]
    for turn in range(3):
        for compiler, variant in zip(nodes, variants, strict=True):
            monkeypatch.setattr(compilers, "get", lambda backend, c=compiler: c)
            binaries.forget()
            binary, how = loader.obtain(variant, injected.TEXT)
            assert binary == compiler.expected(variant), "one node got the other's binary"
            assert how == ("cached" if turn else "compiled")
    assert len(list(cache.Store(here).entries())) == 2


@pytest.mark.parametrize("name", ["CPATH", "COMPILER_PATH", "NVCC_APPEND_FLAGS"])
def test_what_compilers_read_from_the_environment_is_in_the_key(monkeypatch, name):
    first = digest(CPU)
    monkeypatch.setenv(name, "/somewhere")
    second = digest(CPU)
    monkeypatch.setenv(name, "/elsewhere")
    assert len({first, second, digest(CPU)}) == 3
    monkeypatch.delenv(name)
    assert digest(CPU) == first


def test_a_torch_or_python_upgrade_is_no_matter():
    parts = str(compilers.key_of(GPU, sources.shipped(GPU.kernel)).parts) + str(
        compilers.key_of(CPU, sources.shipped(CPU.kernel)).parts
    )
    import sys

    import torch

    assert torch.__version__ not in parts
    assert sys.version.split()[0] not in parts
    assert str(Path.home()) not in parts
    assert sys.prefix not in parts


def test_a_failure_is_remembered_for_its_text_alone(here):
    from jitkern.errors import CompileError

    bad = sources.Text("k", "int x = ;", ())
    for _ in range(2):
        with pytest.raises(CompileError):
            loader.obtain(GPU, bad)
    good = sources.Text("k", f'extern "C" __global__ void {GPU.symbol}() {{}}', ())
    assert loader.obtain(GPU, good)[1] == "compiled"


def test_a_target_cannot_lead_out_of_the_root(here):
    from jitkern.errors import ArgumentError

    with pytest.raises(ArgumentError):
        loader.obtain(Variant("merge_attn_states", "f32", 4, "../../sm_90"))


def test_a_name_of_any_length_and_script_fits_a_file_name(here, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler())
    variant = Variant("核" * 200 + "/../x", "f32", 4, "sm_90", (("n", 1),))
    assert loader.obtain(variant, injected.TEXT)[1] == "compiled"
    assert loader.obtain(variant, injected.TEXT)[1] == "cached"
