"""`gateway serve`, from settings to exit code: what must be there before a worker is, in an order that fails early."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from gateway.machine.kernel import check_libraries, check_source_ips, raise_fd_limit
from gateway.machine.run_dir import open_run_dir
from gateway.settings.urls import url_host
from gateway.supervision.backing import redis_backing
from gateway.supervision.listeners import open_listeners, open_single
from gateway.supervision.logprobs_watch import watch_logprobs
from gateway.supervision.supervisor import Means, Supervisor
from gateway.supervision.worker_process import is_kept, new_instance, worker_environ
from shared.core.adapters import follows_newest
from shared.core.errors import StartError
from shared.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from gateway.supervision.backing import Backing
    from shared.config import Settings

log = logging.getLogger("gateway.serve")

DISTRIBUTION: Final = "tinker-sampling-gateway"
# faulthandler prints the stack of a worker that the supervisor aborts for hanging.
WORKER_COMMAND: Final = (sys.executable, "-X", "faulthandler", "-m", "workers.entry")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a gateway is made of; tests put in another worker and another backing."""

    worker_command: Sequence[str] = WORKER_COMMAND
    make_backing: Callable[[Settings, Path], Backing] = redis_backing
    watch_logprobs: Callable[[Settings, dict[str, bool | None]], Awaitable[None]] = watch_logprobs


def run(settings: Settings, reread: Callable[[], Settings], doubts: Sequence[str] = ()) -> int:
    """Blocks until the gateway has stopped; the exit code. `doubts` about the configuration are logged.

    Raises `StartError`.
    """
    configure_logging(settings.log_format, settings.log_level)
    for doubt in doubts:
        log.warning("the configuration may not be what was meant", extra={"reason": doubt})
    return asyncio.run(serve(settings, reread, Parts()))


async def serve(settings: Settings, reread: Callable[[], Settings], parts: Parts) -> int:
    """Open everything, supervise, close everything; the exit code. Raises `StartError`."""
    check_libraries(tracing=settings.otel_endpoint is not None)
    raise_fd_limit()
    check_source_ips(settings.source_ips)
    check_tls(settings)
    if follows_newest(settings.lora_name_template):
        log.info(
            "all checkpoints of a run are sampled under one name, so older samplers follow the newest weights",
            extra={"lora_name": settings.lora_name_template},
        )
    async with AsyncExitStack() as stack:
        means = await _open(stack, settings, reread, parts)
        return await Supervisor(settings, means).run()


async def _open(stack: AsyncExitStack, settings: Settings, reread: Callable[[], Settings], parts: Parts) -> Means:
    listeners = open_listeners(settings.host, settings.port, settings.workers, settings.backlog)
    stack.callback(listeners.close)
    admin_socket = stack.enter_context(open_single(settings.admin_host, settings.admin_port))
    run_dir = open_run_dir(settings.run_dir)
    stack.callback(run_dir.close)
    backing = parts.make_backing(settings, run_dir.path)
    redis_url = await backing.open()
    stack.push_async_callback(backing.close)
    public_url = f"{'https' if settings.tls_cert else 'http'}://{listeners.address}"
    admin_url = f"http://{url_host(settings.admin_host)}:{admin_socket.getsockname()[1]}"
    return Means(
        listeners=listeners,
        admin_socket=admin_socket,
        backing=backing,
        redis_url=redis_url,
        public_url=public_url,
        version=version(DISTRIBUTION),
        worker_command=parts.worker_command,
        worker_environ=worker_environ(os.environ, run_dir.path, kept=is_kept()),
        reread=reread,
        new_instance=new_instance,
        on_ready=lambda: _print_line(ready_line(settings, public_url, admin_url, backing.description)),
        watch_logprobs=parts.watch_logprobs,
    )


def ready_line(settings: Settings, public_url: str, admin_url: str, kept_in: str) -> str:
    """What an operator wants to know, and what an SDK user sets, in one line."""
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    key = "ONE-OF-YOUR-KEYS" if settings.api_keys is not None else "tml-anything"
    # An address to listen on everywhere is none to connect to.
    base_url = public_url.replace("//0.0.0.0:", "//THIS-HOST:").replace("//[::]:", "//THIS-HOST:")
    return (
        f"gateway ready: {public_url} with {workers}, results in {kept_in}, admin {admin_url};"
        f" export TINKER_BASE_URL={base_url} TINKER_API_KEY={key}"
    )


def _print_line(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:  # whoever started us reads no more
        log.info("the start line could not be printed", extra={"reason": str(error), "line": line})


def check_tls(settings: Settings) -> None:
    """Raises `StartError` where the certificate cannot be served."""
    if settings.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.tls_cert!r} and {settings.tls_key!r}"
        raise StartError(f"--tls-cert and --tls-key: {files} cannot be used together: {error}") from None
