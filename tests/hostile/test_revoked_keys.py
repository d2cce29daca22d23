"""A key that is revoked while its polls are held: each ends with 401 at once, and nobody else's does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from shared.core.callers import Keyring
from tests.app_bench import KEY_A, KEY_B, KEYS, AppBench, session_of
from tests.integration.passthrough.passage import asking, head_of, training_passage
from tests.waiting import until

if TYPE_CHECKING:
    from tests.integration.passthrough.raw_upstream import Exchange


async def test_held_polls_of_samples_and_sessions_end() -> None:
    bench = await AppBench(api_keys=KEYS).open()
    promised = [(await bench.asample(of=session_of(key), key=key)).json["request_id"] for key in (KEY_A, KEY_B)]
    revoked = [
        asyncio.create_task(bench.retrieve(promised[0], key=KEY_A)),
        asyncio.create_task(bench.poll_session(session_of(KEY_A), key=KEY_A)),
        asyncio.create_task(bench.poll_session(session_of(KEY_B), key=KEY_A)),
    ]
    kept = [
        asyncio.create_task(bench.retrieve(promised[1], key=KEY_B)),
        asyncio.create_task(bench.poll_session(session_of(KEY_B), key=KEY_B)),
    ]
    await until(lambda: len(bench.waiters) == 5, "the polls to be held")
    bench.waiters.end_revoked(Keyring(KEYS[1:]).knows)
    assert [one.status for one in await asyncio.gather(*revoked)] == [401, 401, 401]
    # The head of this one came before the reload.
    assert (await bench.retrieve(promised[0], key=KEY_A)).status == 401
    assert not any(poll.done() for poll in kept)
    bench.waiters.send_back()
    assert [one.status for one in await asyncio.gather(*kept)] == [408, 200]
    await bench.close()


async def test_held_polls_of_the_trainer_end() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.wait_closed()

    async with training_passage(api_keys=KEYS) as passage:
        passage.upstream.handler = silent
        polls = [
            asyncio.create_task(
                passage.ask(asking("POST", "/api/v1/retrieve_future", f"X-API-Key: {key}", body=b'{"request_id":"7"}'))
            )
            for key in (KEY_A, KEY_B)
        ]
        await until(lambda: len(passage.upstream.exchanges) == 2, "the trainer to be asked")
        keyring = Keyring(KEYS[1:])
        passage.bench.parts.live.keyring = keyring
        passage.trainer.end_revoked(keyring.knows)
        assert head_of(await polls[0])[":status"] == "401"
        assert not polls[1].done()
        passage.trainer.send_back()
        assert head_of(await polls[1])[":status"] == "408"
