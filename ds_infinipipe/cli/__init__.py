"""The command line: one verb a job. Exit codes: 0 done, 2 bad input, 3 infeasible, 130 interrupted,
1 anything else.

Verbs import what they need when they run, so that `plan` and `schema` never load torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from ds_infinipipe.errors import InfiniPipeError
from ds_infinipipe.launcher import tell_launcher
from ds_infinipipe.runtime.ranks.last_words import LastWords, report_failure

__all__ = ["main"]

_PROGRAM = "infinipipe"
_PATIENCE_S = 3.0
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
# by verb, in the order of --help, its module below this package
_VERBS: Mapping[str, str] = {
    "train": "train",
    "plan": "plan",
    "show": "show",
    "compare": "compare",
    "lengths": "lengths",
    "calibrate": "calibrate",
    "config": "files.config",
    "sweep": "sweep",
    "schema": "files.schema",
    "verify": "verify",
    "replay": "replay",
    "export-hf": "files.export_hf",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; an expected error is one paragraph on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser()
    args, rest = parser.parse_known_args(arguments)
    if args.verb == "sweep":
        after = arguments[arguments.index("sweep") + 1 :]
        args.rest = [a for a in after if a != "--debug"]  # Hydra's own options pass through
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s"
    )
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except InfiniPipeError as error:
        if args.debug:
            raise
        rank = os.environ.get("RANK")
        where = "" if rank is None else f" (rank {rank})"
        # one write, so that the messages of several ranks do not mix
        _report(error, f"{_PROGRAM} {args.verb}{where}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone; keep the interpreter from flushing into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        tell_launcher(traceback.format_exc())
        raise


def _report(error: InfiniPipeError, text: str) -> None:
    """Print an error, under a launcher on one rank."""
    has_joined = isinstance(sys.excepthook, LastWords)
    if not has_joined and os.environ.get("LOCAL_RANK", "0") != "0":
        # The first rank of this machine has most likely found the same, and a launcher ends the
        # others with it.
        time.sleep(_PATIENCE_S)

    def print_whole() -> None:
        sys.stderr.write(text)
        tell_launcher(text)

    report_failure(error, print_whole)


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Elastic pipeline parallelism for unevenly long sequences.",
        epilog="Exit codes: 0 done, 2 bad input, 3 no plan fits the memory, 1 anything else.",
    )
    _add_common(parser, top_level=True)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, place in _VERBS.items():
        module = import_module(f"{__name__}.{place}")
        summary = str(module.__doc__).strip().splitlines()[0]
        verb = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        _add_common(verb, top_level=False)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def _add_common(parser: argparse.ArgumentParser, *, top_level: bool) -> None:
    # a verb's own default would overwrite what was given before the verb
    default = False if top_level else argparse.SUPPRESS
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error"
    )
    # launchers add it right after the module's name; the rank comes from the environment
    parser.add_argument(
        "--local_rank", "--local-rank", default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
