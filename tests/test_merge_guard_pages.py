"""No access outside the operands, by pages without permissions around them: a stray read ends the process.

So it is shown, and not only concluded from values, that what lies behind a row's count of valid partials is never read.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import ctypes, math, mmap, sys
import torch
import jitkern

PAGE = mmap.PAGESIZE
mprotect = ctypes.CDLL(None).mprotect
mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
held = []

def fenced(x, readable=None, front=False):
    '''A copy of x whose bytes end where memory ends (or, in front, begin where it begins). Only the first `readable`
    bytes can be touched; by default all.'''
    size = x.numel() * x.element_size()
    readable = size if readable is None else readable
    pages = -(-size // PAGE) + 1
    room = mmap.mmap(-1, (2 * pages + 1) * PAGE)
    held.append(room)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    at = PAGE if front else pages * PAGE - readable
    y = torch.frombuffer(room, dtype=torch.uint8, count=size, offset=at).view(x.dtype).view(x.shape)
    y.view(-1)[: readable // x.element_size()] = x.view(-1)[: readable // x.element_size()]
    fence, length = (address, PAGE) if front else (address + pages * PAGE, (pages + 1) * PAGE)
    assert mprotect(fence, length, 0) == 0
    return y
"""

CASES = """
def states(n, h, d, dtype):
    torch.manual_seed(n + h + d)
    v = [torch.randn(n, h, d).to(dtype) for _ in range(4)]
    return v, [torch.randn(n, h) for _ in range(4)]

def same(x, y):
    assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))

small = torch.float8_e4m3fn
one = torch.ones(1)
for dtype, shapes in ((torch.float32, [(2, 3, 59)]), (torch.bfloat16, [(13, 3, 80)])):
    for n, h, d in shapes:
        v, s = states(n, h, d, dtype)
        for front in (False, True):
            f = lambda x: fenced(x, front=front)
            out, lse = f(v[0]), f(s[0].T.contiguous())
            sides = f(v[0]), f(s[0].T.contiguous()), f(v[1]), f(s[1].T.contiguous())
            jitkern.merge_attn_states(out, *sides, lse, n // 2)
            expected, expected_lse = torch.empty_like(v[0]), torch.empty(h, n)
            jitkern.merge_attn_states(expected, v[0], s[0].T, v[1], s[1].T, expected_lse, n // 2)
            same((out, lse), (expected, expected_lse))
            codes = f(v[0].to(small))
            mine = f(torch.ones(1))
            jitkern.merge_attn_states(codes, f(v[0]), s[0].T, f(v[1]), s[1].T, None, None, mine)
            x, y, mask = f(v[0]), f(s[0]), f(torch.ones(n, dtype=torch.bool))
            jitkern.merge_state_in_place(x, y, f(v[1]), f(s[1]), mask)
            same((x, y), jitkern.merge_state(v[0], s[0], v[1], s[1]))
            sink = f(torch.zeros(h))
            stack, stack_s = torch.stack(v, 1), torch.stack(s, 1)
            whole = jitkern.merge_states(stack, stack_s, sink=torch.zeros(h))
            same(jitkern.merge_states(f(stack), f(stack_s), sink=sink), whole)
            same(jitkern.merge_states([f(x) for x in v], [f(x) for x in s], sink=sink), whole)
            rows, rows_s = stack.flatten(0, 1), stack_s.flatten(0, 1)
            ends = f(torch.arange(0, 4 * n + 1, 4, dtype=torch.int32))
            same(jitkern.merge_states(f(rows), f(rows_s), indptr=ends, sink=sink), whole)

        # Two of four are valid; the others cannot be read.
        two = jitkern.merge_states(v[:2], s[:2], num_valid=torch.full((n,), 2, dtype=torch.int32))
        count = fenced(torch.full((n,), 2, dtype=torch.int32))
        hidden = [fenced(x, readable=0) for x in v[2:]], [fenced(x, readable=0) for x in s[2:]]
        listed = [fenced(x) for x in v[:2]] + hidden[0], [fenced(x) for x in s[:2]] + hidden[1]
        same(jitkern.merge_states(*listed, num_valid=count), two)
        leaves = [x.requires_grad_() for x in (*listed[0], *listed[1])]
        value, lse = jitkern.merge_states(leaves[:4], leaves[4:], num_valid=count)
        (value.sum() + lse.sum()).backward()
        assert all((x.grad == 0).all() for x in (*leaves[2:4], *leaves[6:]))
        flat = torch.cat(v), torch.cat(s)
        some = [fenced(x, readable=2 * n * x.element_size() * x[0].numel()) for x in flat]
        ends = torch.arange(0, 2 * n + 1, 2, dtype=torch.int32)
        mixed = [torch.stack(x[:2], 1).flatten(0, 1) for x in (v, s)]
        for target, source in zip(some, mixed, strict=True):
            target[: 2 * n] = source
        same(jitkern.merge_states(*some, indptr=ends), two)
        # num_valid of a stack: one token, whose later partials cannot be read.
        token = [torch.stack([x[0] for x in y])[None] for y in (v, s)]
        half = [fenced(x, readable=x.numel() * x.element_size() // 2) for x in token]
        same(jitkern.merge_states(*half, num_valid=count[:1]), [x[:1] for x in two])
print("nothing was touched that should not be")
"""

STRAY = """
x = fenced(torch.zeros(2, 2, 32), readable=2 * 32 * 4)
jitkern.merge_states(x[:, None], torch.zeros(2, 1, 2))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect and how Linux reports a fault")


@linux
def test_no_access_outside_the_operands() -> None:
    done = run(CASES)
    assert done.returncode == 0, done.stderr[-3000:] or f"ended by signal {-done.returncode}"
    assert "nothing was touched" in done.stdout


@linux
def test_the_fence_works() -> None:
    assert run(STRAY).returncode == -signal.SIGSEGV
