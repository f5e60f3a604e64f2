"""What each subcommand of ``jitkern`` does: runs, prints text or JSON, returns the exit code."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jitkern import bench
from jitkern.errors import ArgumentError
from jitkern.version import __version__


def _print(data: Any, as_json: bool, text: str) -> None:
    print(json.dumps(data, indent=1, default=str) if as_json else text)


def run_demo(arguments: argparse.Namespace) -> int:
    """``jitkern demo``."""
    from jitkern import demo

    result = demo.run(arguments.device, quiet=arguments.json)
    lines = [f"jitkern {__version__} on {result['device']}", bench.table(result["rows"])]
    lines.append(
        "Every result agrees with attention over all keys in float64." if result["ok"] else "WRONG: see column ok."
    )
    _print(result, arguments.json, "\n".join(lines))
    return 0 if result["ok"] else 1


def run_doctor(arguments: argparse.Namespace) -> int:
    """``jitkern doctor``: 1 if something that is needed is missing."""
    from jitkern import doctor

    result = doctor.report()
    lines: list[str] = []
    told: dict[str, str] = {}  # one cause of several findings is written out once
    for item in result["findings"]:
        before = told.setdefault(item["text"], item["part"]) if item["status"] != "ok" else item["part"]
        if before != item["part"]:
            lines.append(f"{item['status']:4}  {item['part']:13} as {before}")
            continue
        lines.append(f"{item['status']:4}  {item['part']:13} {item['text']}")
        if item["status"] != "ok" and item["fix"] and item["fix"] not in item["text"]:
            lines.append(f"{'':20}-> {item['fix']}")
    _print(result, arguments.json, "\n".join([*lines, result["verdict"]]))
    return 0 if result["ok"] else 1


def _variants(arguments: argparse.Namespace, siblings: bool = False) -> list[Any]:
    """The variants that a command line names."""
    from jitkern import driver, variants, warm

    targets = arguments.target or [driver.target(0) if driver.available() else "cpu"]
    constants = _constants(arguments.constant)
    wanted = []
    for target in map(variants.check_target, targets):
        backend = "cpu" if target == "cpu" else "nvrtc"
        which = (arguments.kernel, target, backend, arguments.dtype, arguments.pack, constants)
        wanted += warm.choose(*which, siblings=siblings)
    return wanted


def run_warm(arguments: argparse.Namespace) -> int:
    """``jitkern warm``."""
    from jitkern import loader, pool, warm
    from jitkern.progress import Progress

    wanted = _variants(arguments, siblings=True)
    with Progress("jitkern warm", quiet=arguments.json) as say:

        def tell(n: int, count: int, outcome: pool.Outcome) -> None:
            say(f"{n}/{count} {outcome.variant.name}{': failed' if outcome.error else ''}")

        done = warm.fill_cache(wanted, tell, arguments.jobs)
    rows = [{"variant": item.variant.name, "how": item.how, "ms": round(item.seconds * 1000, 1)} for item in done]
    place = loader.store()
    where = str(place.root) if place else "nowhere: no folder can be written to"
    _print({"cache": where, "variants": rows}, arguments.json, f"{bench.table(rows)}\n{len(rows)} variants in {where}")
    return 0 if place else 1


def run_cache(arguments: argparse.Namespace) -> int:
    """``jitkern cache``."""
    from jitkern import loader

    place = loader.store()
    if place is None:
        print("jitkern: there is no cache folder that can be used; jitkern doctor says why", file=sys.stderr)
        return 1
    entries = sorted(place.entries(), key=lambda item: item[1].st_mtime, reverse=True)
    total = sum(size for _, _, size in entries)
    if arguments.action == "path":
        _print({"path": str(place.root)}, arguments.json, str(place.root))
    elif arguments.action == "size":
        _print({"bytes": total, "entries": len(entries)}, arguments.json, f"{total} bytes in {len(entries)} entries")
    elif arguments.action == "list":
        rows = [{"target": path.parent.name, "entry": path.name, "bytes": size} for path, _, size in entries]
        _print(rows, arguments.json, bench.table(rows))
    else:
        removed = place.clear()
        _print({"removed": removed, "bytes": total}, arguments.json, f"removed {removed} entries, {total} bytes")
    return 0


def run_bundle(arguments: argparse.Namespace) -> int:
    """``jitkern cache export``, ``import`` and ``verify``."""
    from jitkern import bundle

    if arguments.bundle_action == "export":
        found = bundle.export_bundle(arguments.file, arguments.target or (), arguments.pattern, arguments.key)
        done = f"wrote {len(found.entries)} entries to {found.path}, {found.bytes} bytes"
        done += ", signed" if found.signed else ""
    elif arguments.bundle_action == "import":
        found = bundle.import_bundle(arguments.file, arguments.key)
        done = f"{found.added} of {len(found.entries)} entries are new in the cache"
    else:
        found = bundle.verify_bundle(arguments.file, arguments.key)
        done = f"{found.path} is good: {len(found.entries)} entries"
        done += ", and its signature is right" if found.signed else ", and nobody asked for a signature (--key)"
    _print(dataclasses.asdict(found), arguments.json, done)
    return 0


def run_why(arguments: argparse.Namespace) -> int:
    """``jitkern why``: 1 if a variant is not cached."""
    from jitkern import binaries

    found = [binaries.why(variant) for variant in _variants(arguments)]
    rows = [dataclasses.asdict(item) | {"variant": item.variant.name, "text": str(item)} for item in found]
    _print(rows, arguments.json, "\n".join(map(str, found)))
    return 0 if all(item.state == "cached" for item in found) else 1


def run_bench(arguments: argparse.Namespace) -> int:
    """``jitkern bench``: 1 if a result of jitkern's is wrong."""
    comparison = importlib.import_module(f"jitkern.benches.{arguments.what}")
    if arguments.out:  # found out before anything is measured, not after
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with open(arguments.out, "a", encoding="utf-8"):
            pass
    result = comparison.run(arguments)
    _print(result, arguments.json, comparison.text(result))
    return 0 if result.get("ok", True) else 1


def _constants(given: Sequence[str]) -> dict[str, int | str]:
    for text in given:
        if not text.partition("=")[0] or "=" not in text:
            raise ArgumentError(f"--constant {text}: expected NAME=VALUE, for example d=96")
    pairs = (text.split("=", 1) for text in given)
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in pairs}


def run_show(arguments: argparse.Namespace) -> int:
    """``jitkern show``."""
    from jitkern import inspecting, sources

    if arguments.kernel is None:
        _print(sources.names(), arguments.json, "\n".join(sources.names()))
        return 0
    constants = _constants(arguments.constant)
    shown = inspecting.choose(arguments.kernel, arguments.target, arguments.dtype, arguments.pack, constants)
    text = shown.form(arguments.form)
    data = {"kernel": arguments.kernel, "variant": shown.variant.name, "symbol": shown.variant.symbol}
    _print({**data, "defines": shown.variant.defines, arguments.form: text}, arguments.json, text)
    return 0


def run_clangd(arguments: argparse.Namespace) -> int:
    """``jitkern clangd``."""
    from jitkern import inspecting

    path = Path(arguments.into) / ".clangd"
    if os.path.lexists(path) and not arguments.force:
        raise ArgumentError(f"{path} is there already; jitkern clangd --force replaces it")
    path.write_text(inspecting.clangd_text(), encoding="utf-8")
    _print({"path": str(path)}, arguments.json, f"wrote {path}; restart the language server of your editor")
    return 0


def run_completion(arguments: argparse.Namespace) -> int:
    """``jitkern completion``."""
    from jitkern import completion, sources

    text = completion.script(arguments.shell, arguments.parser(), sources.names())
    _print({"shell": arguments.shell, "script": text}, arguments.json, text)
    return 0
