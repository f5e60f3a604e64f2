"""Ways to break the decode, one string of its text replaced each, and what the emulator has to say of them.

Left out is what can be taken away unharmed, as another one on every path stands in for it: the values' wait for keys
that the scores have waited for, one of two fences between the same writes and reads, with warpgroups the wait for
queries, whose copies come before those of keys in the same lanes.
"""

from __future__ import annotations

from typing import NamedTuple


class Broken(NamedTuple):
    """A broken kernel: ``old`` becomes ``new``, and the message of the error matches ``words``."""

    what: str
    old: str
    new: str = ""
    words: str = "race|nobody has written"


MEET = "  consumers_meet();\n"
FENCE = "  order_writes_before_matrix_reads();\n"
WAIT = "  warpgroup_wait<0>();\n"
GIVE_BACK = "if (me.lane == 0) barrier_arrive(shared_address(&s.empty[ring.slot]));"
GIVE_BACK_ALL = "  if (me.lane < kBlockChunks) barrier_arrive(shared_address(&s.empty[ring.slot + me.lane]));\n"
WAIT_FOR_CHUNKS = (
    "for (int c = 0; c < kBlockChunks; ++c) barrier_wait(shared_address(&s.full[0][ring.slot + c]), ring.parity);\n"
)
REACHED = "    if (lane == 0 && wave == 0) s.reached[ring.slot] = reached;\n"
ARRIVE = "    if (lane == 0) barrier_arrive(barrier);\n"
NO_FENCE, FORGOTTEN = "no fence.proxy.async", "race|without waiting|NaN|nobody"

ALL = [
    Broken("no wait for a free slot", "barrier_wait(shared_address(&s.empty[ring.slot]), ring.parity ^ 1);"),
    Broken("queries replaced too early", "barrier_wait(shared_address(&s.q_empty), q_parity ^ 1);"),
    Broken("arrival before the copies", "barrier_arrive_after_copies(barrier);", "barrier_arrive(barrier);"),
    Broken("an arrival too few", "kFetchArrivals = 33", "kFetchArrivals = 32"),
    Broken("mask stored behind the arrival", REACHED + ARRIVE, ARRIVE + REACHED),
    Broken("barriers not there yet", "  block_barrier();\n  if (warp", "  if (warp", "race|initialised|nobody"),
]
PLAIN = [
    Broken("no wait for queries", "barrier_wait(shared_address(&s.q_full), q_parity);"),
    Broken("no wait for keys", "barrier_wait(shared_address(&s.full[0][mine.slot]), mine.parity);"),
    Broken("maxima: no barrier", f"{MEET}  PerRow block_max;", "  PerRow block_max;"),
    Broken("weights: no barrier", f"    softmax.sum[half] = sum;\n  }}\n{MEET}", "    softmax.sum[half] = sum;\n  }\n"),
    Broken("sums: no barrier", f"  {MEET}    gather_rows(sums", "    gather_rows(sums"),
    Broken("slot given back while lanes read", f"    __syncwarp();\n    {GIVE_BACK}", f"    {GIVE_BACK}"),
    Broken("slot never given back", GIVE_BACK, "", "deadlock"),
    Broken("wrong rows of Q", "16 * me.tile + me.lane % 16;", "16 * me.tile + (me.lane + 1) % 16;", "off"),
    Broken("wrong columns of V", "kStripe + me.lane / 16 * 8", "kStripe + (1 - me.lane / 16) * 8", "off"),
]
WARPGROUP = [
    Broken("no wait for keys", WAIT_FOR_CHUNKS, ";"),
    Broken("keys: no fence", f"{FENCE}  const Matrix keys", "  const Matrix keys", NO_FENCE),
    Broken("maxima: no barrier", f"{MEET}  PerRow shift;", "  PerRow shift;"),
    Broken("weights: no barrier", FENCE + MEET, FENCE),
    Broken("weights: no fence", FENCE + MEET, MEET, NO_FENCE),
    Broken("no wgmma.fence", "  warpgroup_begin();\n", "", "without wgmma.fence"),
    Broken("no commit", "  warpgroup_commit();\n", "", FORGOTTEN),
    Broken("no wait for the scores", WAIT + "}", "}", FORGOTTEN),
    Broken("no wait for the values", WAIT + GIVE_BACK_ALL, GIVE_BACK_ALL, FORGOTTEN),
    Broken("slot given back before the wait", WAIT + GIVE_BACK_ALL, GIVE_BACK_ALL + WAIT),
    Broken("keys: another swizzle", "((byte / 16) ^ (number % 8))", "((byte / 16) ^ (number % 4))", "off"),
    Broken("weights: another swizzle", "((token / 8) ^ (row % 8))", "((token / 8) ^ (row % 7))", "off"),
]
WAIT_FOR_OTHER = "  if (!is_first) wait_for_other(s, me, pair.parity);\n"
WIDE = [
    Broken("no wait for keys", "      wait_for_keys(s, ring, step / kWaveSteps);\n", "", "race|nobody|fence"),
    Broken("no wait for a wave of keys", "wait_for_keys(s, ring, step / kWaveSteps)", "wait_for_keys(s, ring, 0)"),
    Broken("keys: no fence", f"ring.parity);\n{FENCE}}}", "ring.parity);\n}", NO_FENCE),
    Broken("keys: a wave is told too early", "kFetchArrivals);", "wave ? 1 : kFetchArrivals);"),
    Broken("maxima: no wait", "  barrier_wait(shared_address(&s.maxima_known), pair.parity);\n"),
    Broken("weights over keys that others read", "  warpgroup_meet(me);  // also", "  // also"),
    Broken("weights: told by one warp", "  warpgroup_meet(me);\n  if (me.warp == 0", "  if (me.warp == 0"),
    Broken("weights of the first: no wait", WAIT_FOR_OTHER),
    Broken("weights of the second: no wait", "  if (is_first) wait_for_other(s, me, pair.parity);\n"),
    Broken("values: wrong panels", "* kPanelBytes, kPanelBytes)", "* kPanelBytes, kPanelBytes / 2)", "off|nobody"),
    Broken("values: no wait", WAIT + "  keep_behind_wait(out);\n", "", FORGOTTEN),
    Broken("scores: no wait", WAIT + "  keep_behind_wait(scores);\n", "", FORGOTTEN),
    Broken(
        "weights: no swizzle",
        "in_swizzled_line(to + row * 128, row, 16",
        "in_swizzled_line(to + row * 128, 0, 16",
        "off",
    ),
    Broken(
        "weights: not relative to the first's",
        "    raise_to_other(softmax, s, me, decay);\n",
        "",
        "off|NaN|infinite",
    ),
    Broken(
        "sums: no barrier",
        f"{MEET}#pragma unroll\n  for (int half = 0; half < 2; ++half) sums",
        "  for (int half = 0; half < 2; ++half) sums",
    ),
]
# A lane that looks late at a barrier takes the next phase for its own: seen in some orders only.
LATE_QUERIES = Broken(
    "one lane gives the queries back", "  __syncwarp();\n  if (pair.last", "  if (pair.last", "deadlock|race"
)
TELL = "  if (!is_first && !pair.both) tell_other(s, me);"
LATE_WEIGHTS = Broken(
    "told before it has seen", f"{WAIT_FOR_OTHER}{TELL}", f"{TELL}\n{WAIT_FOR_OTHER}", "deadlock|race"
)
CASES = [
    *(("sm_80", 16, case) for case in ALL + PLAIN),
    *(("sm_90", 16, case) for case in ALL + WARPGROUP),
    *(("sm_90", 64, case) for case in WIDE),
]
