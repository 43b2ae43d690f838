"""Write a checkpoint's weights as a Hugging Face folder; needs no accelerator and one process."""

from __future__ import annotations

import argparse

from ds_infinipipe.errors import ConfigError

__all__ = ["add_arguments", "run"]

_MAX_GB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder of some: the latest"
    )
    parser.add_argument("out", metavar="OUT", help="folder to create")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the weights (default: the one trained with)",
    )
    parser.add_argument("--tag", help="which checkpoint of the folder, instead of the latest")
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest size of a file, 10^9 bytes (default 5)",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the checkpoint's checksums"
    )


def run(args: argparse.Namespace) -> int:
    if not 1e-9 <= args.shard_gb <= _MAX_GB:  # false for NaN
        raise ConfigError(f"--shard-gb {args.shard_gb:g}: give a size above 0, at most {_MAX_GB:g}")
    from ds_infinipipe.runtime.checkpoint.export import export_hf

    report = export_hf(
        args.checkpoint,
        args.out,
        tag=args.tag,
        dtype=args.dtype,
        max_shard_bytes=int(args.shard_gb * 10**9),
        verify=not args.no_verify,
    )
    print(
        f"{report.folder}: {report.num_tensors} tensors of step {report.global_steps}, "
        f"{report.num_bytes / 10**9:.3f} GB in {len(report.files)} files"
    )
    return 0
