"""Registering ops with torch: ``Library.define`` and ``impl``, with a clear refusal of what no kernel takes.

The ``custom_op`` decorator costs 14 microseconds a call, this 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

from jitkern.errors import UnsupportedError
from jitkern.ops import checks

# The same function everywhere: what it cannot take (sparse, nested, of another device) its own checks refuse by name.
_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd", "AutogradNestedTensor")
_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"  # where a call comes while any transform of torch.func is on


def register(library: Any, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``jitkern::<schema>``, run by ``run`` on real tensors and described by ``fake``."""
    name = schema.split("(")[0]
    library.define(schema)
    for key in _KEYS:
        library.impl(name, run, key)
    library.impl(name, _outside_of_transforms(name), _TRANSFORMS)
    torch.library.register_fake(f"jitkern::{name}", fake, lib=library)


def _outside_of_transforms(name: str) -> Callable[..., Any]:
    """Without this, ``jvp`` and ``grad`` of an op that writes to its operands would silently be zero."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor

    def run(*arguments: Any, **keywords: Any) -> Any:
        leaves = _pytree.tree_leaves((arguments, keywords))
        if any(isinstance(leaf, torch.Tensor) and wrapped(leaf) for leaf in leaves):
            raise UnsupportedError(f"{name}: an operand {checks.WRAPPED}")
        with torch._C._DisableFuncTorch():  # nothing here is mapped or differentiated
            return getattr(torch.ops.jitkern, name)(*arguments, **keywords)

    return run
