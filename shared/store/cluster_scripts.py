"""The steps of `scripts.py` that touch several slots, cut into steps of one slot each; `cluster.py` has their order."""

from __future__ import annotations

from typing import Final

from shared.redis.commands import Script
from shared.store.scripts import APPEND, EVEN_WHEN_FULL, READ_LOG_MIXED, WRITE_ENDING, WRITTEN

# KEYS record; ARGV header. The header that was first, or false.
BEGIN_RECORD: Final = Script("""
local found = redis.call('GETRANGE', KEYS[1], 0, 39)
if found ~= '' then return found end
redis.call('SET', KEYS[1], ARGV[1])
return false
""")

# KEYS record; ARGV record, ttl_ms. 0 written, 1 repeated, 2 refused, 3 written where nothing was.
SETTLE_RECORD: Final = Script(WRITE_ENDING + WRITTEN)
SETTLE_RECORD_WITHOUT_RESULT: Final = Script(EVEN_WHEN_FULL + WRITE_ENDING + WRITTEN)

# KEYS record; ARGV owner. {state, bytes with header} of a record of this owner, or false.
OWN_RECORD: Final = Script("""
local head = redis.call('GETRANGE', KEYS[1], 0, 39)
if string.sub(head, 25, 40) ~= ARGV[1] then return false end
return {string.sub(head, 1, 1), redis.call('STRLEN', KEYS[1])}
""")

# KEYS record; ARGV owner, ttl_ms. ORPHANs it when it is PENDING; {state, bytes with header} of a record of this owner
# as it is then, or false.
REAP_RECORD: Final = Script(
    EVEN_WHEN_FULL
    + """
local head = redis.call('GETRANGE', KEYS[1], 0, 39)
if string.sub(head, 25, 40) ~= ARGV[1] then return false end
local state = string.sub(head, 1, 1)
if state == 'P' then
  redis.call('SET', KEYS[1], 'O-' .. string.sub(head, 3), 'PX', ARGV[2])
  state = 'O'
end
return {state, redis.call('STRLEN', KEYS[1])}
"""
)

# KEYS log; ARGV entry, epoch, ttl_ms, look_back. Not when one of the `look_back` newest entries is of the same sample
# and kind.
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

# As `scripts.READ_LOG`, with the epochs that a client sees: whichever node has the log knows its own run id.
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

# KEYS lease; ARGV ttl_ms. 1 when the lease was held.
TAKE_LEASE: Final = Script(
    EVEN_WHEN_FULL
    + """
local held = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return held
"""
)

# KEYS lease, open set. 1 when there is neither.
IS_RETIRED: Final = Script("""
return (redis.call('EXISTS', KEYS[1]) + redis.call('SCARD', KEYS[2])) == 0 and 1 or 0
""")
