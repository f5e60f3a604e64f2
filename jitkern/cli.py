"""The command ``jitkern``, the same as ``python -m jitkern``.

Every subcommand takes ``--json``; an error is then an object, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jitkern import bench
from jitkern.errors import ArgumentError, CompileError, JitkernError, MissError, SettingError, ToolchainError
from jitkern.version import __version__

_CODES = {  # the first class that fits
    ArgumentError: 2,
    SettingError: 2,
    ToolchainError: 3,
    CompileError: 4,
    MissError: 5,
    JitkernError: 1,
}
_EXIT_CODES = """exit codes:
  0    done, and good
  1    done, and something is wrong
  2    the command line or a JITKERN_* variable makes no sense
  3    something that is needed is not installed
  4    a kernel does not compile
  5    a kernel is not cached, and JITKERN_MODE is hit-only
  130  interrupted"""


def _print(data: Any, as_json: bool, text: str) -> None:
    print(json.dumps(data, indent=1, default=str) if as_json else text)


def _demo(arguments: argparse.Namespace) -> int:
    from jitkern import demo

    result = demo.run(arguments.device, quiet=arguments.json)
    lines = [f"jitkern {__version__} on {result['device']}", bench.table(result["rows"])]
    lines.append(
        "Every result agrees with attention over all keys in float64." if result["ok"] else "WRONG: see column ok."
    )
    _print(result, arguments.json, "\n".join(lines))
    return 0 if result["ok"] else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from jitkern import doctor

    result = doctor.report()
    lines = []
    for item in result["findings"]:
        lines.append(f"{item['status']:4}  {item['part']:13} {item['text']}")
        if item["status"] != "ok" and item["fix"] and item["fix"] not in item["text"]:
            lines.append(f"{'':20}-> {item['fix']}")
    _print(result, arguments.json, "\n".join([*lines, result["verdict"]]))
    return 0 if result["ok"] else 1


def _variants(arguments: argparse.Namespace) -> list[Any]:
    """The variants that a command line names."""
    from jitkern import driver, variants, warm

    targets = arguments.target or [driver.target(0) if driver.available() else "cpu"]
    constants = _constants(arguments.constant)
    wanted = []
    for target in map(variants.check_target, targets):
        backend = "cpu" if target == "cpu" else "nvrtc"
        wanted += warm.choose(arguments.kernel, target, backend, arguments.dtype, arguments.pack, constants)
    return wanted


def _warm(arguments: argparse.Namespace) -> int:
    from jitkern import loader, warm
    from jitkern.progress import Progress

    wanted = _variants(arguments)
    with Progress("jitkern warm", quiet=arguments.json) as say:
        done = warm.fill_cache(wanted, lambda n, count, v: say(f"{n}/{count} {v.name}"), arguments.jobs)
    rows = [{"variant": item.variant.name, "how": item.how, "ms": round(item.seconds * 1000, 1)} for item in done]
    place = loader.store()
    where = str(place.root) if place else "nowhere: no folder can be written to"
    _print({"cache": where, "variants": rows}, arguments.json, f"{bench.table(rows)}\n{len(rows)} variants in {where}")
    return 0 if place else 1


def _cache(arguments: argparse.Namespace) -> int:
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


def _bundle(arguments: argparse.Namespace) -> int:
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


def _why(arguments: argparse.Namespace) -> int:
    from jitkern import binaries

    found = [binaries.why(variant) for variant in _variants(arguments)]
    rows = [dataclasses.asdict(item) | {"variant": item.variant.name, "text": str(item)} for item in found]
    _print(rows, arguments.json, "\n".join(map(str, found)))
    return 0 if all(item.state == "cached" for item in found) else 1


def _bench(arguments: argparse.Namespace) -> int:
    from jitkern.benches import merge

    result = merge.run(arguments)
    _print(result, arguments.json, merge.text(result))
    return 0


def _constants(given: Sequence[str]) -> dict[str, int | str]:
    pairs = (text.split("=", 1) if "=" in text else (text, "") for text in given)
    return {name: int(value) if value.lstrip("-").isdigit() else value for name, value in pairs}


def _show(arguments: argparse.Namespace) -> int:
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


def _clangd(arguments: argparse.Namespace) -> int:
    from jitkern import inspecting

    path = Path(arguments.into) / ".clangd"
    if path.exists() and not arguments.force:
        raise ArgumentError(f"{path} is there already; jitkern clangd --force replaces it")
    path.write_text(inspecting.clangd_text(), encoding="utf-8")
    _print({"path": str(path)}, arguments.json, f"wrote {path}; restart the language server of your editor")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from jitkern import completion, sources

    text = completion.script(arguments.shell, _parser(), sources.names())
    _print({"shell": arguments.shell, "script": text}, arguments.json, text)
    return 0


def _name_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", nargs="?", help="a kernel; default: all of them")
    parser.add_argument("--target", action="append", help="sm_XX or cpu, may be repeated; default: this machine's")
    parser.add_argument("--dtype", help="f32, f16, bf16; default: all")
    parser.add_argument("--pack", type=int, help="elements per access; default: the widest")
    parser.add_argument(
        "--constant", action="append", default=[], metavar="NAME=VALUE", help="for example d=96, may be repeated"
    )


def _add_cache(cache: argparse.ArgumentParser) -> None:
    actions = cache.add_subparsers(required=True, metavar="action", dest="action")
    for name, summary in (
        ("path", "print the folder in use"),
        ("list", "list the entries, the last used first"),
        ("size", "count entries and bytes"),
        ("clear", "remove every entry"),
    ):
        _with_json(actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}."))
    for name, summary, key in (
        ("export", "write entries to a bundle", "a private key (Ed25519, PEM) to sign with"),
        ("import", "put a bundle's entries into the cache", "the public key that it must be signed with"),
        ("verify", "check a bundle", "the public key that it must be signed with"),
    ):
        sub = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        sub.add_argument("file", type=Path, help="the bundle")
        sub.add_argument("--key", type=Path, help=key)
        if name == "export":
            sub.add_argument("--target", action="append", help="sm_XX or cpu, may be repeated; default: all")
            sub.add_argument("--pattern", default="*", help="which entries, for example 'merge_attn_states-bf16-*'")
        _with_json(sub)
        sub.set_defaults(run=_bundle, bundle_action=name)


def _with_json(parser: argparse.ArgumentParser) -> None:
    # After the action as well as before it; a default here would undo what stood before.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jitkern",
        description="GPU attention kernels with no build step.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jitkern {__version__}")
    parser.set_defaults(run=None, json=False)
    commands = parser.add_subparsers(metavar="command")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=f"example: {example}"
        )
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run)
        return sub

    demo = command(
        "demo", _demo, "compile a kernel, merge real attention states, check and time it", "jitkern demo --device cpu"
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command("doctor", _doctor, "find every part, launch a probe, say what to do", "jitkern doctor --json")
    warm = command(
        "warm", _warm, "compile variants into the cache, without a GPU", "jitkern warm --target sm_90 --target sm_80"
    )
    _name_variants(warm)
    warm.add_argument("--jobs", type=int, help="how many at once; default: what cores, memory and limits allow")
    _name_variants(
        command("why", _why, "say why variants are not in the cache", "jitkern why merge_attn_states --dtype bf16")
    )
    _add_cache(command("cache", _cache, "look at the disk cache, clear it, carry it", "jitkern cache list"))
    compare = command(
        "bench", _bench, "compare with the public kernels that are installed", "jitkern bench merge --out merge.csv"
    )
    compare.add_argument("what", choices=("merge",))
    compare.add_argument("--out", type=Path, help="a CSV file; plots go beside it, where matplotlib is installed")
    compare.add_argument(
        "--peers", default="jitkern,sglang,triton,eager,flashinfer", help="default: all; also: compile"
    )
    compare.add_argument("--shapes", choices=("baseline", "grid"), default="baseline")
    compare.add_argument("--repeats", type=int, default=7)
    show = command(
        "show", _show, "print a kernel's text, PTX or SASS", "jitkern show merge_attn_states --dtype bf16 --ptx"
    )
    show.add_argument("kernel", nargs="?", help="a shipped kernel, or a .cu file of your own; default: list them")
    show.add_argument("--target", help="sm_XX or cpu; default: this machine's GPU, else sm_90")
    show.add_argument("--dtype", help="f32, f16, bf16; default: the first common variant's")
    show.add_argument("--pack", type=int, help="elements per access; default: the widest")
    show.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE", help="for example d=96")
    forms = show.add_mutually_exclusive_group()
    for form in ("text", "ptx", "sass"):
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=f"print the {form}")
    show.set_defaults(form="text")
    clangd = command("clangd", _clangd, "write a .clangd, so that editors resolve the headers", "jitkern clangd")
    clangd.add_argument("--into", default=".", metavar="FOLDER", help="where to write it; default: here")
    clangd.add_argument("--force", action="store_true", help="replace one that is there")
    shells = command(
        "completion", _completion, "print a completion script for a shell", 'eval "$(jitkern completion bash)"'
    )
    shells.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = (parser := _parser()).parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 2
    try:
        return int(arguments.run(arguments))
    except JitkernError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=1))
        else:
            print(f"jitkern: {error}", file=sys.stderr)
        return next(code for kind, code in _CODES.items() if isinstance(error, kind))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy", "cupy"):
            raise
        print(
            f"jitkern: {error.name} is not installed, and this needs it. Run: pip install {error.name}", file=sys.stderr
        )
        return _CODES[ToolchainError]
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away, as in `jitkern show | head`
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
