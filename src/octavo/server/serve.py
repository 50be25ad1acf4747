"""`octavo serve`: a port, an engine behind it, and their orderly end.

Owns the process: the listening socket (bound before anything loads), the signals, the start-up lines, the drain. The
heavy imports happen while the engine's process loads the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo import __version__
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from octavo.async_llm import AsyncLLM

BACKLOG = 2048  # connections that wait for an accept, also while the model loads
KEEP_ALIVE_SECONDS = 75  # longer than the idle time of common proxies, which would else meet closed connections
LAST_WORDS_SECONDS = 5  # for the error events after the drain; then connections are cut


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises ConfigError (a busy port, at once), CheckpointError, and
    EngineDeadError where the engine cannot be kept alive (exit code 1)."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("octavo").setLevel(server_config.log_level.upper())
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(engine_config, server_config))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Clients that come before the server is up wait in its queue."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"port {port} on {host} cannot be used: {error.strerror} (--port, --host)", param="port"
        ) from None


async def _serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    stopping = asyncio.Event()
    _handle_signals(stopping)
    listener = bind(server_config.host, server_config.port)
    stopped = asyncio.create_task(stopping.wait())
    starting = asyncio.create_task(_start(engine_config, server_config))
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        llm, app = await starting
        try:
            _print_start(llm, app, listener)
            return await _serve_app(listener, app, server_config, stopped)
        finally:
            await llm.close()
    finally:
        stopped.cancel()
        starting.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        listener.close()


async def _start(engine_config: EngineConfig, server_config: ServerConfig) -> tuple[AsyncLLM, Starlette]:
    from octavo.async_llm import AsyncLLM

    name = next(iter(server_config.served_model_name), engine_config.model)
    starting = asyncio.create_task(AsyncLLM.start(engine_config, model_name=name))
    await asyncio.sleep(0)  # the engine's process starts here …
    from octavo.server.app import create_app  # … and loads the model while this one imports

    llm = await starting
    return llm, create_app(llm, server_config)


async def _serve_app(
    listener: socket.socket, app: Starlette, server_config: ServerConfig, stopped: asyncio.Task[bool]
) -> int:
    """Serve until `stopped`, then drain."""
    import uvicorn

    class Http(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the signals are ours

    http = Http(
        uvicorn.Config(
            app,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=math.ceil(server_config.shutdown_timeout + LAST_WORDS_SECONDS),
        )
    )
    front = app.state.front
    serving = asyncio.create_task(http.serve([listener]))
    dead = asyncio.create_task(front.llm.wait_until_dead())
    await asyncio.wait((serving, stopped, dead), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        dead.cancel()
        serving.result()
        return 1
    if dead.done():
        _say(f"{dead.result().message}; this server ends")
        await asyncio.wait((stopped,), timeout=LAST_WORDS_SECONDS)  # clients read their errors, probes a 503
        front.stop()
        http.should_exit = True
        await serving
        raise dead.result()
    dead.cancel()
    front.live.close()  # who only looks on does not hold up the end
    _say(f"shutting down: {front.num_calls} requests have {server_config.shutdown_timeout:g} s to finish")
    http.should_exit = True
    await asyncio.wait((serving,), timeout=server_config.shutdown_timeout)
    front.stop()
    await serving
    return 0


def _handle_signals(stopping: asyncio.Event) -> None:
    """The first one asks for the end; the second one is the end (the engine's process sees ours go, and goes too)."""

    def on_signal(number: int) -> None:
        if stopping.is_set():
            os._exit(128 + number)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


def _print_start(llm: AsyncLLM, app: Starlette, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    name = app.state.front.model_names[0]
    defaults = ", ".join(f"{key}={value}" for key, value in llm.default_sampling_params.items()) or "neutral"
    _say(f"octavo {__version__}: {name} in {llm.info.arithmetic} on {llm.info.isa}, {llm.info.num_threads} threads")
    _say(llm.info.memory_plan)
    _say(f"sampling defaults: {defaults} ({llm.default_sampling_origin})")
    _say(f"ready on {url}; try")
    for line in _examples(llm, url, name, with_key=bool(app.state.front.config.api_key)):
        _say(f"  {line}")


def _examples(llm: AsyncLLM, url: str, name: str, *, with_key: bool) -> list[str]:
    """Lines that work when pasted into a shell."""
    options = "-H 'Content-Type: application/json'"
    if with_key:
        options += ' -H "Authorization: Bearer $OCTAVO_API_KEY"'
    if llm.chat_template is None:
        body = json.dumps({"model": name, "prompt": "The sky is blue because"})
        return [f"curl {url}/v1/completions {options} -d {shlex.quote(body)}"]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    return [
        f"curl {url}/v1/chat/completions {options} -d {shlex.quote(body)}",
        f"{_program()} chat --url {url}",
    ]


def _program() -> str:
    """How this program was called."""
    called = sys.argv[0]
    if os.path.basename(called) != "octavo":
        return "python -m octavo"
    return "octavo" if shutil.which("octavo") == os.path.abspath(called) else shlex.quote(called)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
