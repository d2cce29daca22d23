"""`gateway serve`, from settings to exit code. Everything is opened in an order that makes a start fail early."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from gateway.machine.kernel import check_libraries, check_source_ips, raise_fd_limit
from gateway.machine.run_dir import open_run_dir
from gateway.settings.urls import url_host
from gateway.supervision.backing import redis_backing
from gateway.supervision.fleet_model import USUAL_PACE
from gateway.supervision.listeners import open_listeners, open_single
from gateway.supervision.supervisor import Supervisor, SupervisorParts
from gateway.supervision.worker_process import is_kept, worker_environ
from shared.core.adapters import follows_newest
from shared.core.errors import StartError
from shared.log import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gateway.supervision.backing import Backing
    from gateway.supervision.fleet_model import Pace
    from shared.config import Settings

log = logging.getLogger("gateway.serve")

DISTRIBUTION: Final = "tinker-sampling-gateway"
# faulthandler prints the stack of a worker that hangs and that the supervisor aborts.
WORKER_COMMAND: Final = (sys.executable, "-X", "faulthandler", "-m", "workers.entry")


def run(settings: Settings, reread: Callable[[], Settings], doubts: Sequence[str] = ()) -> int:
    """Block until the gateway has stopped, and return the exit code. Raises `StartError`.

    `doubts` are sentences about the configuration, which are logged.
    """
    configure_logging(settings.log_format, settings.log_level)
    for doubt in doubts:
        log.warning("the configuration may not do what was meant", extra={"reason": doubt})
    return asyncio.run(serve(settings, reread))


async def serve(
    settings: Settings,
    reread: Callable[[], Settings],
    worker_command: Sequence[str] = WORKER_COMMAND,
    make_backing: Callable[[Settings, Path], Backing] = redis_backing,
    pace: Pace = USUAL_PACE,
) -> int:
    """Open everything, supervise the workers, close everything, and return the exit code. Raises `StartError`.

    `reread` returns the settings anew on SIGHUP. Tests hand in another worker, backing and pace.
    """
    check_libraries(tracing=settings.otel_endpoint is not None)
    raise_fd_limit()
    check_source_ips(settings.source_ips)
    check_tls(settings)
    if follows_newest(settings.lora_name_template):
        log.info(
            "all checkpoints of a LoRA run share one name, so older samplers follow the newest weights",
            extra={"lora_name": settings.lora_name_template},
        )
    async with AsyncExitStack() as stack:
        listeners = open_listeners(settings.host, settings.port, settings.workers, settings.backlog)
        stack.callback(listeners.close)
        admin_socket = stack.enter_context(open_single(settings.admin_host, settings.admin_port))
        run_dir = open_run_dir(settings.run_dir)
        stack.callback(run_dir.close)
        backing = make_backing(settings, run_dir.path)
        redis_url = await backing.open()
        stack.push_async_callback(backing.close)
        public_url = f"{'https' if settings.tls_cert else 'http'}://{listeners.address}"
        admin_url = f"http://{url_host(settings.admin_host)}:{admin_socket.getsockname()[1]}"
        parts = SupervisorParts(
            listeners=listeners,
            admin_socket=admin_socket,
            backing=backing,
            redis_url=redis_url,
            public_url=public_url,
            version=version(DISTRIBUTION),
            worker_command=worker_command,
            worker_environ=worker_environ(os.environ, run_dir.path, kept=is_kept()),
            reread=reread,
            on_ready=lambda: _print_line(ready_line(settings, public_url, admin_url, backing.description)),
            pace=pace,
        )
        return await Supervisor(settings, parts).run()


def ready_line(settings: Settings, public_url: str, admin_url: str, kept_in: str) -> str:
    """Write the start line: the addresses for operators, and the variables that an SDK user sets."""
    workers = f"{settings.workers} worker{'s' if settings.workers > 1 else ''}"
    key = "ONE-OF-YOUR-KEYS" if settings.api_keys is not None else "tml-anything"
    # Nobody can connect to a wildcard address.
    base_url = public_url.replace("//0.0.0.0:", "//THIS-HOST:").replace("//[::]:", "//THIS-HOST:")
    return (
        f"gateway ready: {public_url} with {workers}, results in {kept_in}, admin {admin_url};"
        f" export TINKER_BASE_URL={base_url} TINKER_API_KEY={key}"
    )


def _print_line(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:  # nobody reads our standard output any more
        log.info("the start line could not be printed", extra={"reason": str(error), "line": line})


def check_tls(settings: Settings) -> None:
    """Raise `StartError` if the certificate and the key cannot be used."""
    if settings.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.tls_cert!r} and {settings.tls_key!r}"
        raise StartError(f"--tls-cert and --tls-key: {files} cannot be used together: {error}") from None
