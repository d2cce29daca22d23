"""The steps of `scripts.py` that touch several slots, cut into steps of one slot each; `cluster.py` orders them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.redis.commands import Script
from shared.store.scripts import APPEND, EVEN_WHEN_FULL, READ_LOG_MIXED, WRITE_ENDING, WRITTEN, steps_of

if TYPE_CHECKING:
    from shared.core.lifecycle import Transitions


def begin_record(transitions: Transitions) -> Script:
    """Build: KEYS record; ARGV header. Returns the header that was there first, or false."""
    return Script(
        steps_of(transitions)
        + """
local found = redis.call('GETRANGE', KEYS[1], 0, 39)
if not allows(string.sub(found, 1, 1), 'P') then return found end
redis.call('SET', KEYS[1], ARGV[1])
return false
"""
    )


def settle_record(transitions: Transitions, flags: str = "") -> Script:
    """Build: KEYS record; ARGV record, ttl_ms. Returns as `scripts.settle`."""
    return Script(flags + steps_of(transitions) + WRITE_ENDING + WRITTEN)


def reap_record(transitions: Transitions) -> Script:
    """Build: KEYS record; ARGV owner, ttl_ms. ORPHANs it where that is allowed.

    Returns {state, size in bytes with the header} of a record of this owner as it is then, or false.
    """
    return Script(
        EVEN_WHEN_FULL
        + steps_of(transitions)
        + """
local head = redis.call('GETRANGE', KEYS[1], 0, 39)
if string.sub(head, 25, 40) ~= ARGV[1] then return false end
local state = string.sub(head, 1, 1)
if allows(state, 'O') then
  redis.call('SET', KEYS[1], 'O-' .. string.sub(head, 3), 'PX', ARGV[2])
  state = 'O'
end
return {state, redis.call('STRLEN', KEYS[1])}
"""
    )


# KEYS record; ARGV owner. Returns {state, size in bytes with the header} of a record of this owner, or false.
OWN_RECORD: Final = Script("""
local head = redis.call('GETRANGE', KEYS[1], 0, 39)
if string.sub(head, 25, 40) ~= ARGV[1] then return false end
return {string.sub(head, 1, 1), redis.call('STRLEN', KEYS[1])}
""")

# KEYS log; ARGV entry, epoch, ttl_ms, look_back. Appends the entry unless one of the `look_back` newest ones is of the
# same sample and kind.
LOG: Final = Script(
    EVEN_WHEN_FULL
    + APPEND
    + """
if ARGV[4] ~= '0' then
  local wanted = string.match(ARGV[1], '^%a %d+ ')
  for _, entry in ipairs(redis.call('LRANGE', KEYS[1], -ARGV[4], '-1')) do
    if string.sub(entry, 1, #wanted) == wanted then return 0 end
  end
end
append(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
return 1
"""
)

# Like `scripts.READ_LOG`, with the epochs that a client sees: the node that has the log knows its own run id.
READ_LOG: Final = Script(
    "local run = tonumber(string.match(redis.call('INFO', 'server'), 'run_id:(%x%x%x%x%x)'), 16)\n" + READ_LOG_MIXED
)

# KEYS known instances; ARGV owner.
ADD_INSTANCE: Final = Script(
    EVEN_WHEN_FULL
    + """
return redis.call('SADD', KEYS[1], ARGV[1])
"""
)

# KEYS lease; ARGV ttl_ms. Returns 1 if the lease was held.
TAKE_LEASE: Final = Script(
    EVEN_WHEN_FULL
    + """
local held = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return held
"""
)

# KEYS lease, open set. Returns 1 if neither exists.
IS_RETIRED: Final = Script("""
return (redis.call('EXISTS', KEYS[1]) + redis.call('SCARD', KEYS[2])) == 0 and 1 or 0
""")
