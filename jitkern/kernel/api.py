"""``jitkern.Kernel``: a user's CUDA text on the same path as the shipped kernels."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jitkern import driver, launch, variants
from jitkern.errors import ArgumentError, ToolchainError
from jitkern.kernel import arguments, binding, filling, html, measure, quick
from jitkern.kernel.arguments import Scalar, Tensor
from jitkern.kernel.binding import Bound
from jitkern.kernel.holes import Rule, find
from jitkern.kernel.instance import Instance
from jitkern.kernel.signature import declaration
from jitkern.ops import checks
from jitkern.ops.recent import PerThread

_NOTHING = object()  # what a call that launches no block is bound to


def _file(source: str | Path) -> Path | None:
    """The path that a source is, if it is one: a Path, or one line that ends in .cu, .cuh or .cpp."""
    if isinstance(source, Path):
        return source
    return Path(source) if "\n" not in source and source.endswith((".cu", ".cuh", ".cpp")) else None


class Kernel:
    """A CUDA kernel from text, compiled at its first call with each dtype, pack and constant; takes torch tensors.

    The text is ordinary CUDA with one ``__global__`` function. Its parameters become the call's arguments. It may have
    holes: template parameters, or the names ``T`` (element type), ``PACK`` (elements that one 16-byte access moves) and
    those of ``constants``. ``T`` is the dtype of the tensors declared with it, ``PACK`` the widest that their addresses
    and rows allow; both can be given by name in a call. The headers of jitkern's own kernels may be included.

    Args:
        source: the text, or the path of a file.
        name: which ``__global__`` function, where the text has several.
        grid: blocks: a number, up to three numbers, a function of the arguments (``lambda a: a.x.shape[0]``), or a
            Python expression over their names (``"cdiv(x.numel(), 256)"``). May be given in the call instead.
        block: threads of a block, likewise.
        cpu_block: threads of a block on the CPU; default: ``block``. A kernel whose block works on one row, with a
            collective of ``include/reduce.cuh``, takes 1.
        shared: bytes of dynamic shared memory, likewise.
        signature: more about parameters, by name: :class:`Tensor` and :class:`Scalar`.
        constants: values of further holes: a number, a dtype, a function or expression as for ``grid``, or a list of
            candidates, of which the first call with a shape measures the best (see :mod:`jitkern.kernel.tuning`).

    Raises:
        ArgumentError: the text has no kernel, or something given does not fit it.

    Example:
        >>> axpy = Kernel('''
        ... __global__ void axpy(T* y, const T* x, float a, int n) {
        ...   int i = blockIdx.x * blockDim.x + threadIdx.x;
        ...   if (i < n) y[i] = y[i] + a * x[i];
        ... }''', grid="cdiv(n, 256)", block=256)
        >>> import torch
        >>> y = torch.ones(1000)
        >>> axpy(y, torch.ones(1000), 2.0, 1000)
        >>> y.sum().item()
        3000.0
    """

    def __init__(
        self,
        source: str | Path,
        name: str | None = None,
        *,
        grid: Rule = None,
        block: Rule = None,
        cpu_block: Rule = None,
        shared: Rule = 0,
        signature: Mapping[str, Tensor | Scalar] | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        self._given: dict[str, Any] = {
            "grid": grid,
            "block": block,
            "cpu_block": cpu_block,
            "shared": shared,
            "signature": signature,
            "constants": constants,
        }
        self.path = _file(source)
        if self.path is not None and not os.path.isfile(self.path):
            raise ArgumentError(f"Kernel: there is no file {self.path}; give the path of one, or CUDA text")
        self.source = self.path.read_text(encoding="utf-8") if self.path else str(source)
        self.declared = declaration(self.source, name)
        self.name = self.declared.name
        self.label = self.path.name if self.path else f"{self.name}.cu"
        self.grid, self.block, self.cpu_block, self.shared = grid, block, cpu_block, shared
        self.rules = arguments.complete(self.declared, signature)
        self.holes = find(self.source, self.declared, constants or {})
        self.layout = "".join(parameter.format for parameter in self.declared.parameters)
        self.last: Bound | None = None
        self._watched: frozenset[str] = frozenset()
        self._call: Callable[..., None] = self._first_call
        quick.write(self.declared, self.rules, ())  # a name that cannot be a call's is told now

    @property
    def signature(self) -> str:
        """The declaration in one line."""
        return f"{self.name}({', '.join(f'{p.whole} {p.name}' for p in self.declared.parameters)})"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Launch on the current stream of the tensors' device.

        Args:
            args, kwargs: the kernel's parameters in order or by name, then ``stream=`` (a torch or CuPy stream, or a
                raw handle), ``grid=``, ``block=``, and holes by name (``PACK=4``, ``T=torch.float16``).

        Raises:
            ArgumentError: something does not fit; nothing has run.
            CompileError: the text is wrong, with the line.
            UnsupportedError: the CPU cannot run such a text.
            CaptureError: a CUDA graph is being captured and this variant is not ready.
        """
        self._call(*args, **kwargs)

    def warmup(self, *args: Any, device: Any = None, **kwargs: Any) -> Instance:
        """Make a call ready without launching it: compile, load, and choose the constants.

        Args:
            args, kwargs: a call's arguments, or only its holes by name: ``k.warmup(T="bf16", PACK=8)``.
            device: for the second form: a torch device or its name; default: the first GPU, else the CPU.
        """
        names = [parameter.name for parameter in self.declared.parameters]
        kwargs = {name[:-1] if name[:-1] in names and name not in names else name: v for name, v in kwargs.items()}
        if args or any(name in kwargs for name in names):
            call = {key: kwargs.pop(key, None) for key in ("stream", "grid", "block")}
            values = {name: getattr(rule, "default", None) for name, rule in self.rules.items()}
            values |= dict(zip(names, args, strict=False)) | {
                name: kwargs.pop(name) for name in names if name in kwargs
            }
            self.last = binding.bind(self, self._tensors(values), call["stream"], call["grid"], call["block"], kwargs)
            return self.last.instance
        number, target = filling.place(device)
        instance = self.instance(target=target, **kwargs)
        instance.load(number)
        return instance

    def instance(self, *, target: str | None = None, backend: str | None = None, **holes: Any) -> Instance:
        """One variant, for a look at what the compilers make of it; needs no GPU.

        Args:
            target: ``sm_90`` and the like, or ``cpu``; default: that of the last call, else this machine's.
            backend: ``nvrtc``, ``nvcc`` or ``cpu``; default: by the target.
            holes: their values; default: those of the last call, else float32, the widest pack, the first candidate.
        """
        if target is None:
            target = self.last.instance.variant.target if self.last else filling.place(None)[1]
        chosen = backend or ("cpu" if target == "cpu" else "nvrtc")
        return filling.make(self, filling.default_holes(self, holes), variants.check_target(target), chosen)

    def _first_call(self, *args: Any, **kwargs: Any) -> None:
        self._call = self._write_call()
        self._call(*args, **kwargs)

    def _write_call(self) -> Callable[..., None]:
        try:
            import torch
        except ModuleNotFoundError:
            raise ToolchainError(f"{self.name} needs torch, which is not installed. Run: pip install torch") from None
        self._calls, self._recents = PerThread(), quick.Recents()
        return quick.build(
            quick.write(self.declared, self.rules, self._watched),
            self.name,
            here=self._calls,
            recents=self._recents,
            slow=self._slow,
            on=launch.on,
            wrote=launch.wrote,
            nothing=_NOTHING,
            refuse=self._refuse,
            StructError=struct.error,
            is_grad_enabled=torch.is_grad_enabled,
            forward_ad=torch.autograd.forward_ad,
            ODD=checks.ODD,
        )

    def _slow(self, given: dict[str, Any], key: Any, stream: Any, grid: Any, block: Any, holes: dict[str, Any]) -> None:
        """A call that is new: convert, check, bind, remember, launch."""
        here = self._calls
        values = self._tensors(given)
        bound = self.last = binding.bind(self, values, stream, grid, block, holes)
        if not bound.watched <= self._watched:  # the key of the present function says too little
            self._watched |= bound.watched
            self._call = self._write_call()
        elif key is not None and all(values[name] is given[name] for name in values):
            here.keep(key, _NOTHING if bound.call is None else bound.call)
        if bound.call is not None:
            launch.on(bound.call, stream, *binding.packed(self, values))
            launch.wrote(*[values[p.name] for p in quick.written(self.declared) if values[p.name] is not None])

    def _tensors(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, arrays of other frameworks as torch's view of them."""
        return {
            name: arguments.as_tensor(self.name, name, value)
            if value is not None and isinstance(rule, Tensor)
            else value
            for (name, rule), value in zip(self.rules.items(), given.values(), strict=True)
        }

    def _refuse(self, given: dict[str, Any]) -> None:
        for parameter in self.declared.parameters:
            rule = self.rules[parameter.name]
            if parameter.name in given and isinstance(rule, Scalar):
                arguments.check_scalar(self.name, parameter, rule, given[parameter.name])

    @property
    def ptx(self) -> str:
        """PTX of the variant of the last call, or of the default one; see :meth:`instance` for others."""
        return self._gpu_instance().ptx

    @property
    def sass(self) -> str:
        """Machine code of the same variant; needs ``nvdisasm`` or ``cuobjdump``."""
        return self._gpu_instance().sass

    def _gpu_instance(self) -> Instance:
        cpu = self.last is not None and self.last.instance.variant.target == "cpu"
        target = driver.target(0) if driver.available() else "sm_90"
        return self.instance(target=target) if cpu or self.last is None else self.instance()

    @property
    def attributes(self) -> dict[str, Any]:
        """What the variant of the last call, or the default one, takes: registers, memory, and on a GPU occupancy."""
        return measure.attributes(self)

    def bench(self, *args: Any, bytes: int | None = None, **kwargs: Any) -> measure.Bench:
        """Time a call: GPU time by graph replay over rotating copies of the arguments, or the CPU's clock.

        Args:
            args, kwargs: a call's.
            bytes: how many it has to move; default: every tensor once.
        """
        return measure.bench(self, args, kwargs, bytes)

    def to_cupy(self, **holes: Any) -> Any:
        """The same cubin as a function of CuPy, to be called as ``f(grid, block, arguments)``."""
        return measure.to_cupy(self, holes)

    def reload(self) -> Kernel:
        """A new kernel from the same file as it is now; graphs that hold the old one go on replaying it."""
        if self.path is None:
            raise ArgumentError(f"{self.name} was given as text; only a kernel from a file can be read again")
        return Kernel(self.path, self.name, **self._given)

    def __repr__(self) -> str:
        return f"<jitkern.Kernel {self.signature}>"

    _repr_html_ = html.kernel
