"""The Triton decode that jitkern is compared with is right: in each configuration, causal or not, at odd lengths."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is not installed")

from tests import mla_oracle  # noqa: E402


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_every_configuration_agrees_with_float64(heads: int, q_len: int) -> None:
    from jitkern.benches import triton_mla

    step = mla_oracle.make_step([700, 65, 64, 2], heads=heads, q_len=q_len, device="cuda")
    batch, rows = len(step.lengths), heads * q_len
    expected = mla_oracle.reference(step, causal=q_len > 1)
    tried = 0
    for config in triton_mla.configs(batch, rows, max(step.lengths), 132):
        out = torch.full((batch, q_len, heads, 512), torch.nan, device="cuda", dtype=torch.bfloat16)
        lse = torch.full((batch, heads, q_len), torch.nan, device="cuda")
        pieces = triton_mla.scratch(batch, rows, 512, config.splits, "cuda")
        for piece in pieces:
            piece.fill_(torch.nan)  # what no piece wrote must not be read
        try:
            triton_mla.decode(*step.operands(), out, lse, pieces, config, q_len > 1)
        except triton_mla.OutOfResources:
            continue
        mla_oracle.assert_decoded(out, lse, expected)
        tried += 1
    assert tried > 1
