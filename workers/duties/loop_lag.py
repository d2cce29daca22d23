"""How late the event loop is: the one number that tells whether a worker still answers in time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

# Twenty looks a second cost 0.1 % of a core and see every stall that a client could feel.
TICK_S: Final = 0.05
# One minute of looks: what /status and /livez show.
_WINDOW: Final = 1200


class LoopLag:
    """Measures how much later than asked a timer fires."""

    def __init__(self) -> None:
        self._late_ms: deque[float] = deque(maxlen=_WINDOW)

    async def run(self) -> None:
        """Until cancelled; whoever starts it owns it."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_ms.append(max(loop.time() - due_s, 0.0) * 1000)

    def p99_ms(self) -> float:
        late_ms = sorted(self._late_ms)
        return late_ms[int(len(late_ms) * 0.99)] if late_ms else 0.0

    def max_ms(self) -> float:
        return max(self._late_ms, default=0.0)
