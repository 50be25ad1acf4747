"""`octavo serve MODEL`: the options of engine and server, handed to the server."""

from __future__ import annotations

from octavo.cli.flags import add_config_flags, config_from_args
from octavo.cli.parser import Parser
from octavo.config import EngineConfig, ServerConfig


def run(argv: list[str]) -> int:
    parser = Parser("octavo serve", "Serve a model over the OpenAI HTTP API.", "[MODEL] [options]")
    parser.add_argument("model", nargs="?", default=EngineConfig.model, metavar="MODEL", help=MODEL_HELP)
    add_config_flags(parser, ServerConfig, "server")
    add_config_flags(parser, EngineConfig, "engine", exclude=["model"])
    args = parser.parse_args(argv)
    engine_config = config_from_args(args, EngineConfig)
    server_config = config_from_args(args, ServerConfig)

    from octavo.server.serve import serve

    return serve(engine_config, server_config) or 0


MODEL_HELP = "a folder, a .gguf file, a hub id or an alias (default: smollm2)"
