"""`octavo serve MODEL`: the options of engine and server, from the command line and a file, handed to the server."""

from __future__ import annotations

import argparse

from octavo.cli.flags import add_config_flags, config_from_args
from octavo.cli.parser import Parser
from octavo.cli.vllm_options import NOT_YET, add_no_ops
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError


def run(argv: list[str]) -> int:
    args = parse(argv)
    engine_config = config_from_args(args, EngineConfig)
    server_config = config_from_args(args, ServerConfig)

    from octavo.server.serve import serve

    return serve(engine_config, server_config) or 0


def parse(argv: list[str]) -> argparse.Namespace:
    """The options; those of the command line beat those of the file. Raises ConfigError."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.positional is not None:
        if getattr(args, "model", args.positional) != args.positional:
            raise ConfigError(f"MODEL is {args.positional!r}, but --model is {args.model!r}; one of them is enough")
        args.model = args.positional
    if args.config is not None:
        from octavo.cli.config_file import read_config_file

        args = argparse.Namespace(**{**vars(read_config_file(args.config, parser)), **vars(args)})
    if not hasattr(args, "model") and hasattr(args, "swallowed"):
        raise ConfigError(f"there is no MODEL; is it a word of `{args.swallowed}`? (MODEL goes first)")
    return args


def _parser() -> Parser:
    parser = Parser("octavo serve", "Serve a model over the OpenAI HTTP API.", "[MODEL] [options]", NOT_YET)
    parser.add_argument("positional", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--config", metavar="FILE", help="a YAML file of options; those given here beat it")
    add_config_flags(parser, ServerConfig, "server")
    add_config_flags(parser, EngineConfig, "engine")
    add_no_ops(parser)
    return parser


MODEL_HELP = "a folder, a .gguf file, a hub id or an alias (default: smollm2)"
