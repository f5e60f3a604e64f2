"""The kernels of the merges: what is compile-time in each, and which variants are common. Needs no torch.

A machine that only fills a cache for others reads nothing else of the ops.
"""

from __future__ import annotations

from jitkern import variants

PAIR = variants.register(
    variants.Kernel(
        "merge_attn_states",
        {"d": None, "dense": 0, "out": "", "stride": 32, "control": 0},
        tuple(
            (tag, pack, (("d", d), ("dense", dense)))
            for tag, pack in (("f32", 4), ("f16", 8), ("bf16", 8))
            for d in (64, 128, 256, 512)
            for dense in (1, 2)
        ),
    )
)
STATES = variants.register(
    variants.Kernel(
        "merge_states",
        {"d": None, "list": 1, "stride": 32, "count": 0},
        tuple(
            (tag, pack, (("d", d), *count))
            for tag, pack in (("f32", 4), ("f16", 8), ("bf16", 8))
            for d in (128, 512)
            for count in ((), (("count", 4),), (("count", 8),))
        ),
        gpu_only=("count",),
    )
)
BACKWARD = variants.register(
    variants.Kernel(
        "merge_backward",
        {"d": None, "list": 1, "stride": 32},
        tuple((tag, pack, (("d", d),)) for tag, pack in (("f32", 4), ("f16", 8), ("bf16", 8)) for d in (128, 512)),
    )
)
QUANTISE = variants.register(
    variants.Kernel(
        "merge_quantise",
        {"d": None, "out": None, "stride": 32},
        tuple((tag, 8, (("d", d), ("out", "jitkern::e4m3"))) for tag in ("f16", "bf16") for d in (128,)),
    )
)
