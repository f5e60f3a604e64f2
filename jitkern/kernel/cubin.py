"""What a cubin says of its kernel without a GPU: registers, local and shared memory. A cubin is an ELF file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_FRAME_SIZE = 0x11  # attributes of .nv.info: (index of the function's symbol, value)
_REGISTERS = 0x2F
_RESERVED = 1024  # from sm_90 on, the section begins with what the system keeps for itself
_SIZED = 0x04  # the format of an attribute that is followed by its size and that many bytes


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a kernel takes.

    Attributes:
        registers: of a thread.
        local_bytes: of a thread, for spilled registers and for arrays that are indexed at run time.
        shared_bytes: of a block, as far as the text fixes it.
    """

    registers: int
    local_bytes: int
    shared_bytes: int


def resources(cubin: bytes, symbol: str) -> Resources:
    """Read a kernel's resources.

    Raises:
        ValueError: this is no cubin, or the kernel is not in it.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError("no ELF file")
    table, entry, count, names_at = _header(cubin)
    sections = [_SECTION.unpack_from(cubin, table + i * entry) for i in range(count)]
    strings = sections[names_at][4]
    by_name = {_string(cubin, strings + section[0]): section for section in sections}
    symbols = by_name.get(".symtab")
    if symbols is None or f".text.{symbol}" not in by_name:
        raise ValueError(f"no kernel {symbol}")
    index = _symbol_index(cubin, symbols, sections[symbols[6]][4], symbol)
    info = _attributes(cubin, by_name.get(".nv.info"), index)
    shared = by_name.get(f".nv.shared.{symbol}")
    reserved = _RESERVED if ".nv.shared.reserved.0" in by_name else 0
    return Resources(
        info.get(_REGISTERS, by_name[f".text.{symbol}"][7] >> 24),
        info.get(_FRAME_SIZE, 0),
        max(shared[5] - reserved, 0) if shared else 0,
    )


def _header(cubin: bytes) -> tuple[int, int, int, int]:
    """(offset of the section table, size of an entry, entries, index of the names' section)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    return table, entry, count, names


def _string(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode(errors="replace")


def _symbol_index(cubin: bytes, section: tuple[int, ...], strings: int, symbol: str) -> int:
    for number in range(section[5] // _SYMBOL.size):
        name = _SYMBOL.unpack_from(cubin, section[4] + number * _SYMBOL.size)[0]
        if _string(cubin, strings + name) == symbol:
            return number
    raise ValueError(f"no symbol {symbol}")


def _attributes(cubin: bytes, section: tuple[int, ...] | None, index: int) -> dict[int, int]:
    found: dict[int, int] = {}
    if section is None:
        return found
    at, end = section[4], section[4] + section[5]
    while at + 4 <= end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _SIZED:
            continue  # the value was in the size's place
        if size == 8:
            function, value = struct.unpack_from("<II", cubin, at)
            if function == index:
                found[attribute] = value
        at += size
    return found
