"""The store's atomic steps about worker instances: leases, refills, the roll, and what each reports.

The house rules of `scripts.py` hold here, too.
"""

from __future__ import annotations

from typing import Final

from shared.redis.commands import Script
from shared.store.scripts import EVEN_WHEN_FULL

# KEYS lease, known instances; ARGV owner, ttl_ms. Returns 1 if the lease was held.
RENEW_LEASE: Final = Script(
    EVEN_WHEN_FULL
    + """
local held = redis.call('EXISTS', KEYS[1])
redis.call('SET', KEYS[1], '1', 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
return held
"""
)

# KEYS lease. Returns {1 if it is held, seconds since the server started}.
WATCH_LEASE: Final = Script("""
local age_s = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
return {redis.call('EXISTS', KEYS[1]), tonumber(age_s)}
""")

# KEYS refills, a sorted set of owners by the server's time in ms; ARGV owner, window_ms. The key expires with the last
# window.
NOTE_REFILL: Final = Script(
    EVEN_WHEN_FULL
    + """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')
redis.call('PEXPIRE', KEYS[1], last[2] - now_ms)
return 0
"""
)

# KEYS refills. Returns the milliseconds until the last window ends.
REFILL_LEFT: Final = Script("""
return math.max(redis.call('PTTL', KEYS[1]), 0)
""")

_RUN_ID: Final = """
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
"""

# KEYS any key of the server. Returns its run id, which changes with every restart.
SERVER_RUN: Final = Script(_RUN_ID + "return run_id\n")

# KEYS roll, a hash of owners and the run of the server that each has answered; ARGV owner, run, ttl_ms. Returns 1 if it
# still is that run.
ANSWER_ROLL: Final = Script(
    EVEN_WHEN_FULL
    + _RUN_ID
    + """
if run_id ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], run_id)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
)

# KEYS roll; ARGV owner, ttl_ms. Records that the owner is gone in this run: a message alone may reach nobody while a
# server comes back.
LEAVE_ROLL: Final = Script(
    EVEN_WHEN_FULL
    + _RUN_ID
    + """
redis.call('HSET', KEYS[1], ARGV[1], '-' .. run_id)
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
)

# KEYS roll; ARGV ttl_ms. Returns {owners that answered this run, owners gone in it}, and drops the entries of an
# earlier run, which a server that came back with its data still has.
READ_ROLL: Final = Script(
    EVEN_WHEN_FULL
    + _RUN_ID
    + """
local flat, answered, gone = redis.call('HGETALL', KEYS[1]), {}, {}
for at = 1, #flat, 2 do
  if flat[at + 1] == run_id then
    answered[#answered + 1] = flat[at]
  elseif flat[at + 1] == '-' .. run_id then
    gone[#gone + 1] = flat[at]
  else
    redis.call('HDEL', KEYS[1], flat[at])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {answered, gone}
"""
)

# KEYS lease, known instances, open set; ARGV owner.
RELEASE_LEASE: Final = Script("""
redis.call('DEL', KEYS[1])
if redis.call('SCARD', KEYS[3]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
return 0
""")

# KEYS known instances; ARGV the parts of a lease's name before and after the owner.
LAPSED_OWNERS: Final = Script("""
local lapsed = {}
for _, owner in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. owner .. ARGV[2]) == 0 then lapsed[#lapsed + 1] = owner end
end
return lapsed
""")

# KEYS unfetched, a hash of owners and what each reported, after the server's time in ms; ARGV owner, report, ttl_ms.
# Returns the reports of the others, and drops those that are older than ttl_ms.
REPORT_UNFETCHED: Final = Script(
    EVEN_WHEN_FULL
    + """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d', now_ms) .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local flat, others = redis.call('HGETALL', KEYS[1]), {}
for at = 1, #flat, 2 do
  local reported_ms, report = string.match(flat[at + 1], '^(%d+) (.*)$')
  if not reported_ms or now_ms - reported_ms > tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], flat[at])
  elseif flat[at] ~= ARGV[1] then
    others[#others + 1] = report
  end
end
return others
"""
)
