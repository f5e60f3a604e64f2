"""The command ``jitkern``, the same as ``python -m jitkern``.

Every subcommand takes ``--json``; an error is then an object, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jitkern import commands
from jitkern.benches import common
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
        sub.set_defaults(run=commands.run_bundle, bundle_action=name)


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
    parser.set_defaults(run=None, json=False, parser=_parser)
    known = parser.add_subparsers(metavar="command")

    def command(name: str, run: Any, summary: str, example: str) -> argparse.ArgumentParser:
        sub = known.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=f"example: {example}"
        )
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run)
        return sub

    demo = command(
        "demo",
        commands.run_demo,
        "compile a kernel, merge real attention states, check and time it",
        "jitkern demo --device cpu",
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command("doctor", commands.run_doctor, "find every part, launch a probe, say what to do", "jitkern doctor --json")
    warm = command(
        "warm",
        commands.run_warm,
        "compile variants into the cache, without a GPU",
        "jitkern warm --target sm_90 --target sm_80",
    )
    _name_variants(warm)
    warm.add_argument("--jobs", type=int, help="how many at once; default: what cores, memory and limits allow")
    _name_variants(
        command(
            "why",
            commands.run_why,
            "say why variants are not in the cache",
            "jitkern why merge_attn_states --dtype bf16",
        )
    )
    _add_cache(command("cache", commands.run_cache, "look at the disk cache, clear it, carry it", "jitkern cache list"))
    compare = command(
        "bench",
        commands.run_bench,
        "compare with the public kernels that are installed",
        "jitkern bench merge --out merge.csv",
    )
    compare.add_argument("what", choices=("merge", "mla"), help="pairwise merges, or MLA decode")
    common.add_options(compare)
    show = command(
        "show",
        commands.run_show,
        "print a kernel's text, PTX or SASS",
        "jitkern show merge_attn_states --dtype bf16 --ptx",
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
    clangd = command(
        "clangd", commands.run_clangd, "write a .clangd, so that editors resolve the headers", "jitkern clangd"
    )
    clangd.add_argument("--into", default=".", metavar="FOLDER", help="where to write it; default: here")
    clangd.add_argument("--force", action="store_true", help="replace one that is there")
    shells = command(
        "completion",
        commands.run_completion,
        "print a completion script for a shell",
        'eval "$(jitkern completion bash)"',
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
    except OSError as error:
        if not error.filename:
            raise
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=1))
        else:
            print(f"jitkern: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
