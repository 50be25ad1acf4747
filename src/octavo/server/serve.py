"""`octavo serve`: a port, an engine behind it, and their orderly end.

Owns the process: the signals, the start-up lines, the drain. The heavy imports happen while the engine's process loads
the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
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
from functools import partial
from typing import TYPE_CHECKING

from octavo import __version__
from octavo.config import EngineConfig, ServerConfig, responses_store_of_environment
from octavo.errors import OctavoError
from octavo.server.keys import load_keys
from octavo.server.listener import BACKLOG, check_certificate, listening
from octavo.server.logs import notice, set_up_server_logs
from octavo.server.traces import check_traces

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette

    from octavo.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than the idle time of common proxies, which would else meet closed connections
LAST_WORDS_SECONDS = 5  # for the error events after the drain; then connections are cut


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serves until a signal; returns the exit code. Raises ConfigError (a busy port, at once), CheckpointError, and
    EngineDeadError where the engine cannot be kept alive (exit code 1). A log for programs tells of them instead."""
    set_up_server_logs(server_config)
    try:
        server_config = dataclasses.replace(
            server_config,
            api_key=load_keys(server_config),
            enable_responses_store=server_config.enable_responses_store or responses_store_of_environment(),
        )
        check_certificate(server_config)
        check_traces(server_config.otlp_traces_endpoint)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(engine_config, server_config))
    except OctavoError as error:
        if server_config.log_format == "text":
            raise
        logger.critical("%s", error.message)
        return error.exit_code


async def _serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    stopping = asyncio.Event()
    _handle_signals(stopping)
    with listening(server_config) as listener:
        stopped = asyncio.create_task(stopping.wait())
        starting = asyncio.create_task(_start(engine_config, server_config))
        try:
            await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return 0
            llm, app = await starting
            try:
                _print_start(llm, app, listener)
                gc.collect()  # what lives now lives as long as the process:
                gc.freeze()  # no collection need look at it again
                return await _serve_app(listener, app, server_config, stopped)
            finally:
                await llm.close()
                if (tracer := app.state.front.tracer) is not None:
                    await asyncio.to_thread(tracer.close)
        finally:
            stopped.cancel()
            starting.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)


async def _start(engine_config: EngineConfig, server_config: ServerConfig) -> tuple[AsyncLLM, Starlette]:
    from octavo.async_llm import AsyncLLM

    name = next(iter(server_config.served_model_name), engine_config.model)
    log_options = (server_config.log_format, server_config.log_level)
    starting = asyncio.create_task(AsyncLLM.start(engine_config, model_name=name, log_options=log_options))
    await asyncio.sleep(0)  # the engine's process starts here …
    from octavo.server.app import create_app  # … and loads the model while this one imports

    llm = await starting
    try:
        return llm, create_app(llm, server_config)
    except BaseException:  # an option that does not go with the model
        await llm.close()
        raise


async def _serve_app(
    listener: socket.socket, app: Starlette, server_config: ServerConfig, stopped: asyncio.Task[bool]
) -> int:
    """Serve until `stopped`, then drain."""
    ending = asyncio.Event()
    http = _http_server(app, server_config, ending)
    front = app.state.front
    serving = asyncio.create_task(http.serve([listener]))
    dead = asyncio.create_task(front.llm.wait_until_dead())
    await asyncio.wait((serving, stopped, dead), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        dead.cancel()
        serving.result()
        return 1
    if dead.done():
        notice(f"{dead.result().message}; this server ends")
        await asyncio.wait((stopped,), timeout=LAST_WORDS_SECONDS)  # clients read their errors, probes a 503
        front.stop()
        ending.set()
        await serving
        raise dead.result()
    dead.cancel()
    front.live.close()  # who only looks on does not hold up the end
    notice(f"shutting down: {front.num_calls} requests have {server_config.shutdown_timeout:g} s to finish")
    ending.set()
    await asyncio.wait((serving,), timeout=server_config.shutdown_timeout)
    front.stop()
    await serving
    return 0


def _http_server(app: Starlette, config: ServerConfig, ending: asyncio.Event) -> uvicorn.Server:
    """It drains once `ending` is set."""
    import uvicorn

    from octavo.server.connection import Connection

    class Http(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # the signals are ours

        async def main_loop(self) -> None:
            """uvicorn's own wakes up ten times a second, for the date of the answers: here that is each request's."""
            await ending.wait()

    return Http(
        uvicorn.Config(
            app,
            http=partial(Connection, patience=config.client_timeout),  # type: ignore[arg-type]  # what makes one will do
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
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout + LAST_WORDS_SECONDS),
        )
    )


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
    config: ServerConfig = app.state.front.config
    name = app.state.front.model_names[0]
    defaults = ", ".join(f"{key}={value}" for key, value in llm.default_sampling_params.items()) or "neutral"
    notice(f"octavo {__version__}: {name} in {llm.info.arithmetic} on {llm.info.isa}, {llm.info.num_threads} threads")
    notice(llm.info.memory_plan)
    if llm.info.loading:
        notice(f"weights: {llm.info.loading}")
    notice(f"sampling defaults: {defaults} ({llm.default_sampling_origin})")
    _print_tool_calls(app)
    url = _url(config, listener)
    ready = f"ready on {url if config.uds is None else config.uds}"
    if config.log_format == "json":
        notice(ready)
        return
    notice(f"{ready}; try")
    for line in _examples(llm, config, url, name):
        notice(f"  {line}")


def _print_tool_calls(app: Starlette) -> None:
    calling = app.state.front.tool_calling
    if calling is not None:
        unseen = "" if calling.is_shown else "; but the chat template leaves a request's tools out of the prompt"
        notice(f"tool calls: {calling.name}{unseen}")


def _url(config: ServerConfig, listener: socket.socket) -> str:
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _examples(llm: AsyncLLM, config: ServerConfig, url: str, name: str) -> list[str]:
    """Lines that work when pasted into a shell."""
    options = "-H 'Content-Type: application/json'"
    if config.api_key:
        options += ' -H "Authorization: Bearer $OCTAVO_API_KEY"'
    if config.uds is not None:
        options += f" --unix-socket {shlex.quote(config.uds)}"
    if llm.chat_template is None:
        body = json.dumps({"model": name, "prompt": "The sky is blue because"})
        return [f"curl {url}/v1/completions {options} -d {shlex.quote(body)}"]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
    curl = f"curl {url}/v1/chat/completions {options} -d {shlex.quote(body)}"
    return [curl] if config.uds is not None else [curl, f"{_program()} chat --url {url}"]


def _program() -> str:
    """How this program was called."""
    called = sys.argv[0]
    if os.path.basename(called) != "octavo":
        return "python -m octavo"
    return "octavo" if shutil.which("octavo") == os.path.abspath(called) else shlex.quote(called)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
