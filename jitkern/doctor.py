"""``jitkern doctor``: find every part, compile and launch a probe, say what is missing and the line that brings it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from jitkern import cache, driver, loader, settings, sources, toolchain
from jitkern.compilers import nvrtc
from jitkern.errors import JitkernError
from jitkern.variants import Variant

_PROBE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
extern "C" __global__ void JITKERN_ENTRY(float* out) {
  out[threadIdx.x] = __bfloat162float(__float2bfloat16(1.0f)) + __half2float(__float2half(2.0f));
}
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        part: what was looked at.
        status: ``ok``, ``note`` (optional, and absent), or ``fail``.
        text: what was found.
        fix: what to do, where something is to be done.
    """

    part: str
    status: str
    text: str
    fix: str = ""


def _check(part: str, look: Callable[[], str], fix: str = "", optional: bool = False) -> Finding:
    try:
        return Finding(part, "ok", look())
    except (JitkernError, ImportError, OSError) as error:
        return Finding(part, "note" if optional else "fail", str(error), fix)


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    raise ImportError(f"{package} is not installed")


def _settings() -> str:
    settings.get()  # a value that makes no sense would otherwise be told by every other part
    return ", ".join(f"{n}={os.environ[n]}" for n, _, _ in settings.table() if n in os.environ) or "defaults"


def _torch() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads"


def _driver() -> str:
    number = driver.version()
    import torch

    names = [f"{torch.cuda.get_device_name(i)} ({driver.target(i)})" for i in range(torch.cuda.device_count())]
    return f"knows CUDA {number // 1000}.{number % 1000 // 10}; {', '.join(names) or 'no device'}"


def _nvrtc() -> str:
    library = toolchain.nvrtc()
    text = f"{library.version} at {library.path}"
    if driver.available() and driver.version() // 1000 < library.major:
        raise JitkernError(f"{text} is newer than the driver, which knows CUDA {driver.version() // 1000} at most")
    return text


def _headers() -> str:
    folder = toolchain.cuda_include()
    version, library = toolchain.header_version(folder), toolchain.nvrtc()
    if version // 1000 != library.major:
        raise JitkernError(f"CUDA {version // 1000}.{version % 1000 // 10} at {folder}, but NVRTC is {library.version}")
    if toolchain.cccl_include() is None:
        raise JitkernError(f"{folder} has no nv/target, which cuda_fp16.h includes")
    return f"CUDA {version // 1000}.{version % 1000 // 10} at {folder} (only your own kernels need them)"


def _header_probe() -> str:
    text = sources.flatten("probe", _PROBE, "probe.cu")
    target = driver.target(0) if driver.available() else "sm_90"
    nvrtc.Nvrtc().compile(Variant("probe", "f32", 4, target), text)
    return f"a text with cuda_bf16.h, cuda_fp16.h and cuda_fp8.h compiles for {target}"


def _cache() -> str:
    place = cache.open_store()
    if place is None:
        roots = ", ".join(str(path) for path, _ in cache.default_roots()) or "nowhere"
        raise JitkernError(f"no usable folder (looked at {roots}): kernels are compiled anew by every process")
    sizes = [size for _, _, size in place.entries()]
    limit = settings.get().cache_max
    return f"{place.root}: {len(sizes)} entries, {sum(sizes) / 1e6:.1f} MB of {limit / 1e6:.0f} MB"


def _probe(device: str, backend: str) -> Callable[[], str]:
    def look() -> str:
        import torch

        from jitkern.ops.merge import merge_attn_states

        a = torch.ones(3, 2, 64, device=device, dtype=torch.bfloat16)
        lse = torch.zeros(2, 3, device=device)
        out, out_lse = torch.zeros_like(a), torch.zeros_like(lse)
        merge_attn_states(out, a, lse, 3 * a, lse, out_lse, backend=backend)
        if not (torch.all(out == 2) and torch.allclose(out_lse, torch.full_like(lse, 0.6931472))):
            raise JitkernError(f"the probe ran on {device} and gave a wrong result")
        variant = Variant(
            "merge_attn_states",
            "bf16",
            8,
            "cpu" if device == "cpu" else driver.target(0),
            (("d", 64), ("dense", 2)),
            backend,
        )
        function = loader.get(variant, loader.CPU if device == "cpu" else 0)
        return f"merge_attn_states compiled, launched and checked ({function.how}, {function.seconds * 1000:.0f} ms)"

    return look


def findings() -> list[Finding]:
    """Look at every part. Needs neither torch nor a GPU to answer."""
    has_gpu = driver.available()
    torch_line = "pip install torch"
    found = [
        Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
        _check("settings", _settings, "correct the variable, or unset it"),
        _check("torch", _torch, torch_line),
        _check("driver", _driver, "nothing to do unless this machine has an NVIDIA GPU", optional=not has_gpu),
        _check("nvrtc", _nvrtc, toolchain.NVRTC_HINT, optional=not has_gpu),
        _check("cuda headers", _headers, toolchain.NVRTC_HINT, optional=True),
        _check("header probe", _header_probe, toolchain.NVRTC_HINT, optional=True),
        _check(
            "c++ compiler",
            lambda: toolchain.host_compiler().identity.splitlines()[0],
            "apt-get install g++",
            optional=has_gpu,
        ),
        _check("ninja", toolchain.ninja, "pip install ninja", optional=has_gpu),
        _check("nvcc", lambda: " ".join(toolchain.nvcc()), "only backend='nvcc' needs it", optional=True),
        _check(
            "cupy",
            lambda: (
                next(filter(None, map(_installed, ("cupy-cuda13x", "cupy-cuda12x", "cupy"))), None) or _version("cupy")
            ),
            "only JITKERN_LOADER=cupy needs it",
            optional=True,
        ),
        _check("cache", _cache, "set JITKERN_CACHE_DIR to a folder of your own"),
    ]
    if any(item.part == "torch" and item.status == "ok" for item in found):
        # On a machine with a GPU the CPU backend is a convenience, and the other way round there is no GPU backend.
        found.append(_check("probe cpu", _probe("cpu", "cpu"), "see the lines above", optional=has_gpu))
        if has_gpu:
            found.append(_check("probe gpu", _probe("cuda:0", "nvrtc"), "see the lines above"))
    return found


def _installed(package: str) -> str | None:
    with contextlib.suppress(ImportError):
        return f"{package} {_version(package)}"
    return None


def report() -> dict[str, Any]:
    """The findings, and one line that says what to do."""
    found = findings()
    failed = [item for item in found if item.status == "fail"]
    if failed:
        # A probe that is the first to fail has no lines above it that would say more.
        fix = "" if failed[0].part.startswith("probe") else failed[0].fix
        verdict = f"To do: {failed[0].part}: {fix or failed[0].text}"
    else:
        verdict = f"Ready: kernels run on the {'GPU' if driver.available() else 'CPU (no NVIDIA GPU here)'}."
    return {"ok": not failed, "verdict": verdict, "findings": [asdict(item) for item in found]}
